"""What is alive at the moment when a compiled program needs most: its buffers, by its schedule.

Each computation is followed once in the order in which it runs, a loop for one turn. An array lives from the
instruction that makes it to the last that reads it or a view of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from zerojax.cost.buffers import Buffer, Instruction, Module, fields_of, numbers_of

_BITS = {n: bits for bits, numbers in {
    8: (1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 16: (3, 7, 10, 16), 32: (4, 8, 11), 64: (5, 9, 12, 15), 128: (18,),
    4: (21, 22, 32), 2: (26, 27), 1: (30, 31),
}.items() for n in numbers}  # fmt: skip # of xla_data.proto's PrimitiveType; tokens and the like have none
_TUPLE = 13
_SAME = frozenset(["add-dependency", "all-reduce-done", "async-update", "bitcast", "opt-barrier"])
_VIEWS = _SAME | {"get-tuple-element", "tuple"}
_ENDS = {"all-gather-done": 1, "async-done": 1, "collective-permute-done": 1, "copy-done": 0}  # where the result is
_CALLS = frozenset(["async-start", "call", "conditional", "while"])
_SUMS = frozenset(["all-reduce", "all-reduce-start", "reduce-scatter"])
_ELEMENTWISE = frozenset([
    *("abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare", "convert", "cosine"),
    *("divide", "erf", "exponential", "exponential-minus-one", "floor", "is-finite", "log", "log-plus-one", "logistic"),
    *("maximum", "minimum", "multiply", "negate", "not", "or", "power", "reduce-precision", "remainder"),
    *("round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic"),
    *("shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor"),
])  # fmt: skip
_WRITES = frozenset(["dynamic-update-slice", "scatter"])  # into their first operand


def at_the_peak(module: bytes) -> list[Buffer]:
    """The buffers besides arguments and results that are alive when they need most, largest first.

    Those in other memory than the device's main one do not count.

    Args:
      module: ``as_serialized_hlo_module_proto()`` of a compiled module, which is scheduled.
    """
    run = _Run(Module(module))
    alive = run.temporary()
    changes = [0] * (run.now + 2)
    for array in alive:
        changes[array.first] += array.bytes
        changes[array.last + 1] -= array.bytes
    needed = list(accumulate(changes))
    peak = needed.index(max(needed))
    scope = run.module.scope
    found = [Buffer(a.bytes, scope(a.maker), a.dims, scope(a.reducer)) for a in alive if a.first <= peak <= a.last]
    return sorted(found, key=lambda buffer: -buffer.bytes)


@dataclass(eq=False)
class _Array:
    bytes: int
    dims: tuple[int, ...]
    maker: int
    first: int
    last: int
    reducer: int = -1
    within: "_Array | None" = None  # in whose memory it lies

    def place(self) -> "_Array":
        found = self
        while found.within is not None:
            found = found.within
        return found


_Value = _Array | tuple["_Value", ...]


class _Run:
    """A program followed through its schedule."""

    def __init__(self, module: Module):
        self.module, self.now = module, 0
        self.arrays: list[_Array] = []
        self._turns: list[tuple[_Array, _Array]] = []
        self._values: dict[int, _Value] = {}
        entry = [module.instructions[key] for key in module.order[module.entry]]
        shapes = {i.index: i.shape for i in entry if i.opcode == "parameter"}
        self._arguments = [self._made(shapes[n], 0) for n in sorted(shapes)]
        self._results = self._computation(module.entry, self._arguments)

    def temporary(self) -> list[_Array]:
        """All that lies neither in an argument nor in a result."""
        others = {array.place() for array in _leaves((*self._arguments, self._results))}
        found = [array for array in self.arrays if array.bytes and array.place() not in others]
        before: dict[_Array, _Array] = {}
        for array in found:  # in one memory one ends where the next begins
            earlier = before.get(array.place())
            if earlier is not None:
                earlier.last = min(earlier.last, array.first - 1)
            before[array.place()] = array
        free = {*found}
        for read, made in self._turns:  # read for the last time, and made in its memory
            if made in free and read.last == made.first and read.bytes == made.bytes:
                free.remove(made)
                read.last -= 1
        return found

    def _computation(self, number: int, arguments: list[_Value]) -> _Value:
        for key in self.module.order[number]:
            self.now += 1
            i = self.module.instructions[key]
            operands = [self._values[n] for n in i.operands]
            if i.opcode not in _VIEWS:
                self._used(tuple(operands), key if i.opcode in _SUMS else None)
            self._values[key] = arguments[i.index] if i.opcode == "parameter" else self._result(key, i, operands)
            self._note_turns(i, operands, self._values[key])
        self.now += 1
        result = self._values[self.module.roots[number]]
        self._used(result)
        return result

    def _note_turns(self, i: Instruction, operands: list[_Value], result: _Value):
        """What may lie in the memory of an operand, as each element is made of the one that lies there."""
        for n, operand in enumerate(operands):
            if isinstance(operand, _Array):
                places = self._reached(i.called[0], n) if i.opcode == "fusion" else [[]] * (i.opcode in _ELEMENTWISE)
                made = [_part(result, place) for place in places]
                self._turns += [(operand, array) for array in made if isinstance(array, _Array)]

    def _reached(self, computation: int, argument: int) -> list[list[int]]:
        """Where in a fusion's result an argument goes element by element, if it goes nowhere else."""
        reached = set()
        for key in self.module.order[computation]:
            i = self.module.instructions[key]
            if (i.opcode == "parameter" and i.index == argument) or not reached.isdisjoint(i.operands):
                if i.opcode not in _ELEMENTWISE | {"parameter", "bitcast", "tuple"}:
                    return []
                reached.add(key)
        return [place for place, part in self._results_of(computation) if part in reached]

    def _results_of(self, computation: int) -> list[tuple[list[int], int]]:
        """The instructions that make a fusion's results, and the place of each."""
        number = self.module.roots[computation]
        root = self.module.instructions[number]
        return [([n], part) for n, part in enumerate(root.operands)] if root.opcode == "tuple" else [([], number)]

    def _used(self, value: _Value, reducer: int | None = None):
        for array in _leaves(value):
            array.last = self.now
            if reducer is not None:
                array.reducer = reducer

    def _made(self, shape: bytes, maker: int) -> _Value:
        """New memory for an instruction's result."""
        fields = dict(fields_of(shape))
        if fields.get(2) == _TUPLE:
            return tuple(self._made(part, maker) for number, part in fields_of(shape) if number == 4)
        dims = tuple(numbers_of(shape, 3))
        elsewhere = dict(fields_of(fields.get(5, b""))).get(8)  # the layout's memory space
        size = 0 if elsewhere else -(-math.prod(dims) * _BITS.get(fields.get(2, 0), 0) // 8)
        array = _Array(size, dims, maker, self.now, self.now)
        self.arrays.append(array)
        return array

    def _result(self, key: int, i: Instruction, operands: list[_Value]) -> _Value:
        if i.opcode in _SAME:
            return operands[0]
        if i.opcode == "tuple":
            return tuple(operands)
        if i.opcode == "get-tuple-element":
            return _part(operands[0], [i.index])
        if i.opcode in _ENDS:
            return _part(operands[0], [_ENDS[i.opcode]])
        if i.opcode in _CALLS:
            return self._called(i, operands)
        made = self._made(i.shape, key)
        if i.opcode == "constant":  # lies in the program
            for array in _leaves(made):
                array.bytes = 0
        elif i.opcode == "copy-start":
            made = self._instead(made, [1], operands[0])
        elif i.opcode in ("all-gather-start", "collective-permute-start"):
            made = self._instead(made, [0], operands[0] if len(operands) == 1 else tuple(operands))
        return self._in_place(i, made, operands)

    def _called(self, i: Instruction, operands: list[_Value]) -> _Value:
        if i.opcode == "while":
            body, condition = i.called
            self._computation(condition, operands)
            result = self._computation(body, operands)
            _share(operands[0], result)
            return result
        if i.opcode == "conditional":
            results = [self._computation(n, [value]) for n, value in zip(i.called, operands[1:], strict=True)]
            for other in results[:-1]:
                _share(other, results[-1])
            return results[-1]
        result = self._computation(i.called[0], operands)
        return self._in_place(i, (tuple(operands), result) if i.opcode == "async-start" else result, operands)

    def _in_place(self, i: Instruction, made: _Value, operands: list[_Value]) -> _Value:
        """The result, with operands where it is written into their memory."""
        for place, number, part in [*i.aliases, *self._written(i)]:
            made = self._instead(made, place, _part(operands[number], part))
        return made

    def _written(self, i: Instruction) -> Iterator[tuple[list[int], int, list[int]]]:
        """As `Instruction.aliases`, what an instruction does not say itself."""
        if i.opcode in _WRITES:
            yield [], 0, []
        elif i.opcode == "all-reduce-start":
            yield from (([n] if len(i.operands) > 1 else [], n, []) for n in range(len(i.operands)))
        elif i.opcode == "fusion":
            for place, part in self._results_of(i.called[0]):
                writer = self._source(part)
                into = self._source(writer.operands[0]) if writer.opcode in _WRITES else None
                if into and into.opcode == "parameter":
                    yield place, into.index, []

    def _source(self, number: int) -> Instruction:
        """What an instruction is another view of."""
        found = self.module.instructions[number]
        return self._source(found.operands[0]) if found.opcode == "bitcast" else found

    def _instead(self, made: _Value, place: list[int], value: _Value) -> _Value:
        """A result with another value at one place, whose memory is not needed then."""
        if place:
            n, *rest = place
            parts = enumerate(_parts(made))
            return tuple(self._instead(part, rest, value) if k == n else part for k, part in parts)
        for array in _leaves(made):
            array.bytes = 0
        return value


def _parts(value: _Value) -> tuple[_Value, ...]:
    if not isinstance(value, tuple):
        raise ValueError("this program takes an array for a tuple")
    return value


def _part(value: _Value, place: list[int]) -> _Value:
    for n in place:
        value = _parts(value)[n]
    return value


def _leaves(value: _Value) -> Iterator[_Array]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _share(first: _Value, then: _Value):
    """One memory, by turns."""
    for one, other in zip(_leaves(first), _leaves(then), strict=True):
        if other.place() is not one.place():
            other.place().within = one.place()

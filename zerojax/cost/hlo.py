"""The collectives of a compiled program, read from its text (HLO) as the CPU, GPU and TPU compilers print it.

It is the program of one device; all sizes are of what that device holds or sends.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_PRODUCT = re.compile(r'custom_call_target="[^"]*(gemm|matmul|cublas|conv)', re.IGNORECASE)


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, in one dtype.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      dtype: HLO's name of what is sent, such as "f32" or "bf16".
      elements: of the whole side: a gather's result, a reduce-scatter's operand; else operand and result are equal.
      group: devices that take part with this one, itself included; for a permute, all that send or receive.
      times: how often it runs in a step.
      axis: the mesh axes along which its group lies, joined by "+"; "" if the mesh is not known, or it follows none.

    >>> c = Collective("all-gather", "bf16", elements=1024, group=8, times=24)
    >>> c.bytes, c.total_bytes, c.wire_bytes
    (2048, 49152, 43008.0)
    """

    kind: str
    dtype: str
    elements: int
    group: int
    times: int = 1
    axis: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the whole side, once."""
        return -(-self.elements * _bits(self.dtype) // 8)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole side, over the step."""
        return self.bytes * self.times

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in a step, by the ring algorithm."""
        if self.kind == "collective-permute":
            return float(self.total_bytes)
        sent = self.total_bytes * (self.group - 1) / self.group
        return 2 * sent if self.kind == "all-reduce" else sent


def collectives(hlo_text: str, axes: Mapping[str, int] | None = None) -> list[Collective]:
    """The collectives of a compiled program (``compiled.as_text()``), in program order.

    One in a loop stands once and counts as often as the loop runs, one in nested loops likewise. An asynchronous one
    counts once, at its start. Of the branches of a conditional, the one that sends most counts. A combined one sums
    its arrays per dtype. On TPU a reduce-scatter may stand as a fusion of all-reduce and slice, and a gather be
    repeated in the fusions that it runs beside: they count as one reduce-scatter (padded, as TPU sends it) and one
    gather. Left out: ``ragged-all-to-all``, ``collective-broadcast``, ``send``, ``recv``, and what kernels send.

    Args:
      axes: the mesh's axes and their sizes, in the order of its devices (``dict(mesh.shape)``).

    Raises:
      ValueError: if a loop has collectives, and nothing in the program says how often it runs.

    >>> collectives('''HloModule m, num_partitions=8
    ... ENTRY %main (x: f32[4]) -> f32[32] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %g = f32[32]{0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
    ... }''')
    [Collective(kind='all-gather', dtype='f32', elements=32, group=8, times=1, axis='')]
    """
    return [seen.collective for seen in overlap(hlo_text, axes)]


def made(hlo_text: str) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every array that instructions of a program make; those inside of fusions are never stored.

    >>> sorted(made("ENTRY %m () -> f32[2] {\\n  ROOT %c = (f32[2]{0}, s32[]) custom-call()\\n}"))
    [('f32', (2,)), ('s32', ())]
    """
    program, found = _Program(hlo_text), set()
    for name, instructions in program.computations.items():
        if name in program.fused:
            continue
        for i in instructions:
            if i.opcode not in ("parameter", "get-tuple-element"):
                found.update(re.findall(r"([a-z]\w*)\[([\d,]*)\]", i.shape))
    return frozenset((dtype, tuple(int(n) for n in re.findall(r"\d+", dims))) for dtype, dims in found)


def is_scheduled(hlo_text: str) -> bool:
    """Whether the program starts collectives and ends them elsewhere, so that its text tells what runs beside them."""
    return "-start(" in hlo_text or "async_collective" in hlo_text


class Seen(NamedTuple):
    """A collective, and whether a matrix product is scheduled between its start and its end."""

    collective: Collective
    overlapped: bool


def overlap(hlo_text: str, axes: Mapping[str, int] | None = None) -> list[Seen]:
    """The collectives of a compiled program as `collectives`, and what of them runs beside matrix products.

    The text of a GPU or TPU program is its schedule: what stands between a collective's start and its end runs while
    it travels. The CPU's collectives have no start of their own, so that none is overlapped.

    >>> seen = overlap('''HloModule m, num_partitions=8
    ... ENTRY %main (x: f32[4], y: f32[8,8]) -> (f32[32], f32[8,8]) {
    ...   %x = f32[4]{0} parameter(0)
    ...   %y = f32[8,8]{1,0} parameter(1)
    ...   %s = (f32[4]{0}, f32[32]{0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
    ...   %p = f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ...   %d = f32[32]{0} all-gather-done(%s)
    ...   ROOT %t = (f32[32]{0}, f32[8,8]{1,0}) tuple(%d, %p)
    ... }''')
    >>> [(one.collective.kind, one.overlapped) for one in seen]
    [('all-gather', True)]
    """
    program = _Program(hlo_text, axes)
    if program.entry is None:
        raise ValueError("this text has no ENTRY computation: give as_text() of a compiled program")
    return list(program.collectives(program.entry))


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str
    root: bool

    @property
    def names(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.operands)

    def called(self, attribute: str) -> list[str]:
        """The computations that an attribute names: ``body=%b`` or ``calls=%c`` or ``branch_computations={%p, %q}``."""
        match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", match.group(1)) if match else []


class _Program:
    """The text of a program, cut into computations and instructions."""

    def __init__(self, text: str, axes: Mapping[str, int] | None = None):
        self._axes = dict(axes or {})
        header = text[: text.find("\n", text.find("HloModule"))]
        self.devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry = None
        self._found: dict[str, tuple[Seen, ...]] = {}
        self._products: dict[str, bool] = {}
        self._read(text)
        self.fused = {
            name
            for instructions in self.computations.values()
            for i in instructions
            if i.opcode == "fusion"
            for name in i.called("calls")
        }
        self._loops = {
            name: (i, within)
            for within, instructions in self.computations.items()
            for i in instructions
            for name in (i.called("body") if i.opcode == "while" else ())
        }

    def _read(self, text: str):
        current = None
        for line in text.splitlines():
            if line.endswith("{") and " = " not in line and (head := re.match(r"(ENTRY\s+)?%?([\w.\-]+)", line)):
                current = self.computations.setdefault(head.group(2), [])
                self.entry = head.group(2) if head.group(1) else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (instruction := _instruction(line)):
                current.append(instruction)

    def collectives(self, name: str) -> tuple[Seen, ...]:
        """Of a computation and all that it calls, run once."""
        if name not in self._found:
            found = []
            for i in self.computations.get(name, ()):
                found.extend(self._of(i, name))
            self._found[name] = tuple(found)
        return self._found[name]

    def _of(self, i: _Instruction, within: str) -> Iterable[Seen]:
        if i.opcode.removesuffix("-start") in _KINDS:
            return self._own(i, within)
        if i.opcode == "while":
            return self._loop(i, within)
        if i.opcode == "conditional":
            names = [n for a in ("branch_computations", "true_computation", "false_computation") for n in i.called(a)]
            return max(map(self.collectives, names), key=_wire_bytes, default=())
        if i.opcode.endswith(("-update", "-done")):  # of an asynchronous call that was counted at its start
            return ()
        names = [n for a in ("calls", "to_apply", "called_computations") for n in i.called(a)]
        return [c for name in names for c in self.collectives(name)]

    def _loop(self, i: _Instruction, within: str) -> list[Seen]:
        body = [c for n in i.called("body") for c in self.collectives(n)]
        condition = [c for n in i.called("condition") for c in self.collectives(n)]
        if not body and not condition:
            return []
        trips = self._trips(i, within)
        if trips is None:
            raise ValueError(
                f"the loop %{i.name} has collectives, but its trip count is unknown, so they cannot be counted; use "
                "lax.scan, or lax.fori_loop with constant bounds"
            )
        runs = [(body, trips), (condition, trips + 1)]  # a condition is asked once more than it is true
        return [Seen(replace(c, times=c.times * n), beside) for part, n in runs for c, beside in part if n]

    def _own(self, i: _Instruction, within: str) -> list[Seen]:
        if _chain(i) and not self._starts_chain(i, within):
            return []
        kind, counts, group = i.opcode.removesuffix("-start"), _elements(_result(i)), self._group(i)
        if kind == "all-reduce" and within.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # TPU's fusion; its all-reduce has the shape of the whole
        elif kind == "reduce-scatter":
            counts = {dtype: n * group for dtype, n in counts.items()}
        beside, axis = self._is_overlapped(i, within), self._axis(i)
        return [Seen(Collective(kind, dtype, n, group, axis=axis), beside) for dtype, n in counts.items()]

    def _is_overlapped(self, start: _Instruction, within: str) -> bool:
        """Whether a matrix product stands between the start of a collective and its end."""
        if chain := _chain(start):
            return self._is_chain_overlapped(chain, within)
        if not start.opcode.endswith("-start"):
            return False
        instructions = self.computations[within]
        after = instructions[instructions.index(start) + 1 :]
        end = next((n for n, i in enumerate(after) if i.opcode.endswith("-done") and start.name in i.names), 0)
        return any(self._is_product(i) for i in after[:end])

    def _is_chain_overlapped(self, chain: str, within: str) -> bool:
        """The same on TPU, where a collective runs inside a chain of fusions."""
        for instructions in self.computations.values():
            links = [n for n, i in enumerate(instructions) if any(self._has_link(c, chain) for c in i.called("calls"))]
            if any(within in instructions[n].called("calls") for n in links):
                return any(self._is_product(i) for i in instructions[links[0] : links[-1] + 1])
        return False

    def _has_link(self, name: str, chain: str) -> bool:
        return any(_chain(i) == chain for i in self.computations.get(name, ()))

    def _is_product(self, i: _Instruction) -> bool:
        """Whether an instruction is a matrix product or a convolution, or runs one."""
        if i.opcode in ("dot", "convolution") or (i.opcode == "custom-call" and _PRODUCT.search(i.attributes)):
            return True
        return any(self._has_product(name) for a in ("calls", "to_apply", "body") for name in i.called(a))

    def _has_product(self, name: str) -> bool:
        if name not in self._products:
            self._products[name] = any(self._is_product(i) for i in self.computations.get(name, ()))
        return self._products[name]

    def _starts_chain(self, i: _Instruction, within: str) -> bool:
        """TPU repeats an asynchronous collective in every fusion beside it; only one of them is the start."""
        users = (u for u in self.computations[within] if u.opcode == "custom-call" and i.name in u.names)
        return any('"AsyncCollectiveStart"' in u.attributes for u in users)

    def _group(self, i: _Instruction) -> int:
        if pairs := re.search(r"source_target_pairs=\{([{}\d,\s]*)\}", i.attributes):
            return len(set(re.findall(r"\d+", pairs.group(1)))) or 1
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", i.attributes):
            return int(iota.group(2))
        if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", i.attributes):
            return _mesh_group(*mesh.groups())
        lists = re.search(r"replica_groups=\{([{}\d,\s]*)\}", i.attributes)
        groups = re.findall(r"\{([^{}]*)\}", lists.group(1)) if lists else []
        return max((len(re.findall(r"\d+", g)) for g in groups), default=0) or self.devices

    def _axis(self, i: _Instruction) -> str:
        if not self._axes:
            return ""
        if mesh := re.search(r"replica_groups=mesh\[[^\]]*\].*? \{([^}]*)\}", i.attributes):
            names = re.findall(r"'?([^',:]+)'?(?::\(\d+\)\d+)?(?=,|$)", mesh.group(1))
            if set(names) <= set(self._axes):
                return "+".join(names)
            if self._group(i) != self.devices:  # XLA's own axes
                return ""
        return _along(_members(i.attributes, self.devices), self._axes)

    # A TPU program has no known_trip_count: read `i < bound` from the condition, the step from the body, and the
    # first value from where the loop is entered.

    def _trips(self, i: _Instruction, within: str) -> int | None:
        if known := re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', i.attributes):
            return int(known.group(1))
        condition, body = i.called("condition")[0], i.called("body")[0]
        compare = self._root(condition)
        if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            return None
        counter, bound = (self._source(n, condition) for n in compare.names)
        index = _index(counter)
        if index is None:
            return None
        first = self._constant(i.names[0], within, index)
        step, end = self._step(body, index), self._constant(bound.name, condition)
        if first is None or end is None or step is None or step < 1:
            return None
        return max(0, -(-(end - first) // step))

    def _step(self, body: str, index: int) -> int | None:
        """What a turn of a loop adds to the counter."""
        root = self._root(body)
        add = self._source(root.names[index], body) if root and root.opcode == "tuple" else None
        if add is None or add.opcode != "add":
            return None
        left, right = (self._source(n, body) for n in add.names)
        if _index(left) != index:
            left, right = right, left
        return self._constant(right.name, body) if _index(left) == index else None

    def _root(self, name: str) -> _Instruction | None:
        return next((i for i in self.computations.get(name, ()) if i.root), None)

    def _source(self, name: str, within: str) -> _Instruction:
        """An instruction, or what it copies."""
        i = next(i for i in self.computations[within] if i.name == name)
        copies = i.opcode in ("copy", "copy-start", "copy-done", "bitcast", "opt-barrier")
        return self._source(i.names[0], within) if copies else i

    def _constant(self, name: str, within: str, index: int | None = None) -> int | None:
        """The integer that an instruction (of a tuple, its element ``index``) always is."""
        i = self._source(name, within)
        if index is None and i.opcode == "constant" and re.fullmatch(r"-?\d+", i.operands.strip()):
            return int(i.operands)
        if index is None and _index(i) is not None:
            return self._constant(i.names[0], within, _index(i))
        if index is not None and i.opcode == "tuple":
            return self._constant(i.names[index], within)
        if index is not None and i.opcode == "parameter" and within in self._loops:
            return self._carried(within, index)
        return None

    def _carried(self, body: str, index: int) -> int | None:
        """The integer that a loop carries unchanged from before its first turn."""
        root = self._root(body)
        same = root is not None and root.opcode == "tuple" and _index(self._source(root.names[index], body)) == index
        loop, within = self._loops[body]
        return self._constant(loop.names[0], within, index) if same else None


def _instruction(line: str) -> _Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = re.match(r"\s*([\w\-]+)\(", line[end:])
    if end < 0 or not opcode:
        return None
    inside = end + opcode.end()
    close = _closing(line, inside - 1)
    return _Instruction(
        head.group(2), line[start:end], opcode.group(1), line[inside : close - 1], line[close:], bool(head.group(1))
    )


def _closing(line: str, start: int) -> int:
    """The position after the bracket that closes the one at ``start``; layouts have brackets of their own."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)


def _chain(i: _Instruction) -> str | None:
    """The chain of fusions over which a TPU's asynchronous collective runs."""
    found = re.search(r'chain_id="?(\d+)', i.attributes)
    return found.group(1) if found else None


def _members(attributes: str, devices: int) -> list[int]:
    """The devices of the first group of a collective; of a permute, the first that sends and who receives it."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        sizes = [int(n) for n in iota.group(3).split(",")]
        order = [int(n) for n in iota.group(4).split(",")] if iota.group(4) else range(len(sizes))
        strides = [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]
        numbers = [0]
        for dim in order:  # the last dim changes first
            numbers = [number + strides[dim] * n for number in numbers for n in range(sizes[dim])]
        return numbers[: int(iota.group(2))]
    lists = re.search(r"(?:replica_groups|source_target_pairs)=\{\s*\{([\d,\s]*)\}", attributes)
    return [int(n) for n in re.findall(r"\d+", lists.group(1))] if lists else list(range(devices))


def _along(members: list[int], axes: Mapping[str, int]) -> str:
    """The axes along which these devices of a mesh differ."""
    names = []
    stride = math.prod(axes.values())
    for name, size in axes.items():
        stride //= size
        if len({member // stride % size for member in members}) > 1:
            names.append(name)
    return "+".join(names)


def _wire_bytes(seen: Iterable[Seen]) -> float:
    return sum(one.collective.wire_bytes for one in seen)


def _index(i: _Instruction) -> int | None:
    """Which element of a tuple an instruction takes."""
    found = re.search(r"\bindex=(\d+)", i.attributes) if i.opcode == "get-tuple-element" else None
    return int(found.group(1)) if found else None


def _result(i: _Instruction) -> str:
    """The shape of what a collective results in; a start's own shape is a tuple of operands, results and contexts."""
    if not i.opcode.endswith("-start") or not i.shape.startswith("("):
        return i.shape
    parts = _parts(i.shape)
    nested = parts[0].startswith("(")  # ((operands), results, ...)
    if i.opcode == "all-reduce-start" and not nested:
        return i.shape  # it has results only
    return parts[1]


def _parts(shape: str) -> list[str]:
    """The elements of a tuple shape."""
    parts, depth, begin = [], 0, 1
    for match in re.compile(r"[(){}\[\],]").finditer(shape):
        if match.group() in "({[":
            depth += 1
        elif match.group() in ")}]":
            depth -= 1
        if depth == 0 or (depth == 1 and match.group() == ","):
            parts.append(re.sub(r"/\*.*?\*/", "", shape[begin : match.start()]).strip())
            begin = match.end()
    return parts


def _elements(shape: str) -> dict[str, int]:
    """Elements per dtype of an array's or a tuple's shape."""
    counts: Counter = Counter()
    for dtype, dims in re.findall(r"([a-z]\w*)\[([^\]]*)\]", shape):
        if _bits(dtype):
            counts[dtype] += math.prod(int(d) for d in re.findall(r"\d+", dims))
    return dict(counts)


def _bits(dtype: str) -> int:
    """Bits of an element: the first number in the dtype's name; 0 of a token, which has no data."""
    number = re.match(r"[a-z]+(\d+)", dtype)
    return 8 if dtype == "pred" else int(number.group(1)) if number else 0


def _mesh_group(axes: str, used: str) -> int:
    """Devices along the used axes of ``mesh['a'=4,'b'=2] {'a'}``; ``'a':(2)2`` is the part of size 2 of an axis."""
    sizes = {name: int(n) for name, n in re.findall(r"'?([^',]+?)'?=(\d+)(?=,|$)", axes)}
    parts = re.findall(r"'?([^',:]+)'?(?::\(\d+\)(\d+))?(?=,|$)", used)
    return math.prod(int(part) if part else sizes[name] for name, part in parts)

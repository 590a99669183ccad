"""What is alive at the moment when a compiled program needs most: its buffers, by the instructions that made them.

XLA's compilers leave a record of their buffer assignment (``BufferAssignmentProto`` of xla/service/hlo.proto), and the
module that belongs to it (``HloModuleProto``). Both are read here without XLA's own classes, which Python has not.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_VIEWS = frozenset(
    ["bitcast", "copy", "copy-done", "copy-start", "get-tuple-element", "opt-barrier", "reshape", "transpose"]
)
_STEPS = 32  # from view to view, at most
_NOT_TEMPORARY = (3, 5, 7, 12)  # an allocation of one thread, of an argument, of a result, of a constant


class Buffer(NamedTuple):
    """An array in memory.

    Attributes:
      bytes: its size.
      scope: JAX's name of the operation that made it, with its named scopes: "jit(step)/.../dot_general". Of a copy or
        another view, that of the operation whose result it is; "" if XLA made it of its own.
      dims: its shape; of a tuple, empty.
    """

    bytes: int
    scope: str
    dims: tuple[int, ...]


def at_the_peak(assignment: bytes, module: bytes) -> list[Buffer] | None:
    """The buffers besides arguments and results that are alive when they need most, largest first.

    ``None`` if the record does not tell, as that of jaxlib 0.10.0.

    Args:
      assignment: ``compiled.memory_analysis().serialized_buffer_assignment_proto``.
      module: ``as_serialized_hlo_module_proto()`` of the compiled module.
    """
    makers, buffers, temporary, found, told = _Module(module), {}, set(), [], False
    for number, value in _fields(assignment):
        fields = dict(_fields(value)) if number in (1, 3, 5) else {}
        if number == 1:
            maker = dict(_fields(fields.get(3, b""))).get(4, 0)
            buffers[fields.get(1, 0)] = fields.get(2, 0), maker
        elif number == 3 and not any(fields.get(n) for n in _NOT_TEMPORARY):
            temporary.add(fields.get(1, 0))
        elif number == 5:  # what is alive when an allocation is fullest
            told = True
            found.extend(buffers[key] for key in _packed(fields.get(2, b"")) if fields.get(1, 0) in temporary)
    if not told:
        return None
    named = [Buffer(size, makers.scope(maker), makers.dims(maker)) for size, maker in found]
    return sorted(named, key=lambda buffer: -buffer.bytes)


class _Instruction(NamedTuple):
    opcode: str
    scope: str
    shape: bytes
    index: int
    operands: list[int]
    within: int


class _Module:
    """A module's instructions by their numbers."""

    def __init__(self, message: bytes):
        self.instructions: dict[int, _Instruction] = {}
        self.loops: dict[int, int] = {}  # by the number of the body
        for number, computation in _fields(message):
            if number == 3:
                self._read(computation)

    def scope(self, number: int) -> str:
        """The scope of an instruction, or of what it is a view of."""
        for _ in range(_STEPS):
            i = self.instructions.get(number)
            if i is None:
                return ""
            if i.scope and i.opcode not in _VIEWS:
                return i.scope
            following = self._viewed(i)
            if following is None:
                return i.scope
            number = following
        return ""

    def dims(self, number: int) -> tuple[int, ...]:
        """The shape of an instruction's result."""
        dims: list[int] = []
        for field, value in _fields(self.instructions[number].shape if number in self.instructions else b""):
            if field == 3:
                dims.extend(_packed(value) if isinstance(value, bytes) else [value])
        return tuple(dims)

    def _viewed(self, i: _Instruction) -> int | None:
        """What an instruction copies or takes out of; of what a loop carries, what it began with."""
        if i.opcode == "get-tuple-element":
            source = self.instructions.get(i.operands[0])
            if source and source.opcode == "parameter":
                source = self.instructions.get(self.loops.get(source.within, -1))
            if source and source.opcode == "while":
                source = self.instructions.get(source.operands[0])
            if source and source.opcode == "tuple":
                return source.operands[i.index]
        return i.operands[0] if i.operands else None

    def _read(self, computation: bytes):
        fields = list(_fields(computation))
        own = next((value for number, value in fields if number == 5), 0)
        for number, instruction in fields:
            if number != 2:
                continue
            operands, called, values = [], [], {}
            for field, value in _fields(instruction):
                values[field] = value
                if field in (36, 38):
                    many = operands if field == 36 else called
                    many.extend(_packed(value) if isinstance(value, bytes) else [value])
            scope = dict(_fields(values.get(7, b""))).get(2, b"").decode()
            opcode = values.get(2, b"").decode()
            key = values.get(35, 0)
            self.instructions[key] = _Instruction(opcode, scope, values.get(3, b""), values.get(13, 0), operands, own)
            if opcode == "while":
                self.loops.update(dict.fromkeys(called, key))


# ---- the wire format of protocol buffers ----


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Its fields: number and value, an integer or bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(message, position)
        elif kind == 2:
            size, position = _varint(message, position)
            value, position = message[position : position + size], position + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value = struct.unpack("<Q" if kind == 1 else "<I", message[position : position + size])[0]
            position += size
        else:
            raise ValueError(f"this is no message of protocol buffers: wire type {kind}")
        yield key >> 3, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _packed(message: bytes) -> list[int]:
    values, position = [], 0
    while position < len(message):
        value, position = _varint(message, position)
        values.append(value)
    return values

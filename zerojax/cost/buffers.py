"""A compiled module's instructions, in the order in which they run, and the buffers that they make.

A module is a message ``HloModuleProto`` of xla/service/hlo.proto, read here without XLA's own classes, which Python has
not.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_VIEWS = frozenset(
    ["bitcast", "copy", "copy-done", "copy-start", "get-tuple-element", "opt-barrier", "reshape", "transpose"]
)
_STEPS = 32  # from view to view, at most


class Buffer(NamedTuple):
    """An array in memory.

    Attributes:
      bytes: its size.
      scope: JAX's name of the operation that made it, with its named scopes: "jit(step)/.../dot_general". Of a copy or
        another view, that of the operation whose result it is; "" if XLA made it of its own.
      dims: its shape.
      reducer: JAX's name of the sum over devices that reads it; "" if there is none.
    """

    bytes: int
    scope: str
    dims: tuple[int, ...]
    reducer: str


class Instruction(NamedTuple):
    """One of a module.

    Attributes:
      opcode: its kind.
      scope: JAX's name of the operation, with its named scopes.
      shape: a message ``ShapeProto``.
      index: of a get-tuple-element, which element; of a parameter, which one.
      operands: numbers of instructions.
      called: numbers of computations.
      within: the number of its computation.
      aliases: what lies in an operand's memory: place in the result, operand, place in the operand.
    """

    opcode: str
    scope: str
    shape: bytes
    index: int
    operands: list[int]
    called: list[int]
    within: int
    aliases: list[tuple[list[int], int, list[int]]]


class Module:
    """A module's instructions by their numbers.

    Attributes:
      instructions: by number.
      order: of each computation the numbers of its instructions, as they run.
      roots: of each computation the number of the instruction whose result is its own.
      entry: the number of the computation that the program is.
    """

    def __init__(self, message: bytes):
        self.instructions: dict[int, Instruction] = {}
        self.order: dict[int, list[int]] = {}
        self.roots: dict[int, int] = {}
        self.entry = 0
        self._loops: dict[int, int] = {}  # by the number of the body
        schedule = b""
        for number, value in fields_of(message):
            if number == 3:
                self._read(value)
            elif number == 6:
                self.entry = value
            elif number == 7:
                schedule = value
        for _, entry in fields_of(schedule):
            parts = dict(fields_of(entry))
            self.order[parts.get(1, 0)] = numbers_of(parts.get(2, b""), 1)

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

    def _viewed(self, i: Instruction) -> int | None:
        """What an instruction copies or takes out of; of what a loop carries, what it began with."""
        if i.opcode == "get-tuple-element":
            source = self.instructions.get(i.operands[0])
            if source and source.opcode == "parameter":
                source = self.instructions.get(self._loops.get(source.within, -1))
            if source and source.opcode == "while":
                source = self.instructions.get(source.operands[0])
            if source and source.opcode == "tuple":
                return source.operands[i.index]
        return i.operands[0] if i.operands else None

    def _read(self, computation: bytes):
        parts = list(fields_of(computation))
        own = dict(parts).get(5, 0)
        self.roots[own] = dict(parts).get(6, 0)
        self.order[own] = []
        for number, instruction in parts:
            if number == 2:
                key, found = _instruction(instruction, own)
                self.instructions[key] = found
                self.order[own].append(key)
                if found.opcode == "while":
                    self._loops.update(dict.fromkeys(found.called, key))


def _instruction(message: bytes, within: int) -> tuple[int, Instruction]:
    """It, and its number."""
    values = dict(fields_of(message))
    opcode = values.get(2, b"").decode()
    scope = dict(fields_of(values.get(7, b""))).get(2, b"").decode()
    index = values.get(9 if opcode == "parameter" else 13, 0)
    aliases = [
        (numbers_of(alias, 1), dict(fields_of(alias)).get(2, 0), numbers_of(alias, 3))
        for number, alias in fields_of(message) if number == 74
    ]  # fmt: skip
    operands, called = numbers_of(message, 36), numbers_of(message, 38)
    return values.get(35, 0), Instruction(opcode, scope, values.get(3, b""), index, operands, called, within, aliases)


# ---- the wire format of protocol buffers ----


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
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


def numbers_of(message: bytes, field: int) -> list[int]:
    """All that a repeated field of integers holds, packed or not."""
    found = []
    for number, value in fields_of(message):
        if number == field:
            found.extend(_packed(value) if isinstance(value, bytes) else [value])
    return found

"""What a step costs: memory and collectives read from a compiled program, and the closed formulas to compare with.

The text of a compiled program (HLO) is read as the CPU, GPU and TPU compilers print it. It is the program of one
device; all sizes are of what that device holds or sends.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax

from zerojax import tables

Tree = Any

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# The CPU backend's default scheduler favours concurrency over memory; with this one, figures are comparable with other
# backends'. As a compile option the older xla_cpu_enable_concurrency_optimized_scheduler is accepted and does nothing.
_CPU_OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


# ---- collectives ----


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, in one dtype.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      dtype: HLO's name of what is sent, such as "f32" or "bf16".
      elements: of the whole side: a gather's result, a reduce-scatter's operand; else operand and result are equal.
      group: devices that take part with this one, itself included; for a permute, all that send or receive.
      times: how often it runs in a step.

    >>> c = Collective("all-gather", "bf16", elements=1024, group=8, times=24)
    >>> c.bytes, c.total_bytes, c.wire_bytes
    (2048, 49152, 43008.0)
    """

    kind: str
    dtype: str
    elements: int
    group: int
    times: int = 1

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


def collectives(hlo_text: str) -> list[Collective]:
    """The collectives of a compiled program (``compiled.as_text()``), in program order.

    One in a loop stands once and counts as often as the loop runs, one in nested loops likewise. An asynchronous one
    counts once, at its start. Of the branches of a conditional, the one that sends most counts. A combined one sums
    its arrays per dtype. On TPU a reduce-scatter may stand as a fusion of all-reduce and slice, and a gather be
    repeated in the fusions that it runs beside: they count as one reduce-scatter (padded, as TPU sends it) and one
    gather. Left out: ``ragged-all-to-all``, ``collective-broadcast``, ``send``, ``recv``, and what kernels send.

    Raises:
      ValueError: if a loop has collectives, and nothing in the program says how often it runs.

    >>> collectives('''HloModule m, num_partitions=8
    ... ENTRY %main (x: f32[4]) -> f32[32] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %g = f32[32]{0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
    ... }''')
    [Collective(kind='all-gather', dtype='f32', elements=32, group=8, times=1)]
    """
    program = _Program(hlo_text)
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

    def __init__(self, text: str):
        header = text[: text.find("\n", text.find("HloModule"))]
        self.devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry = None
        self._found: dict[str, tuple[Collective, ...]] = {}
        self._read(text)
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

    def collectives(self, name: str) -> tuple[Collective, ...]:
        """Of a computation and all that it calls, run once."""
        if name not in self._found:
            found = []
            for i in self.computations.get(name, ()):
                found.extend(self._of(i, name))
            self._found[name] = tuple(found)
        return self._found[name]

    def _of(self, i: _Instruction, within: str) -> Iterable[Collective]:
        if i.opcode.removesuffix("-start") in _KINDS:
            return self._own(i, within)
        if i.opcode == "while":
            return self._loop(i, within)
        if i.opcode == "conditional":
            names = [n for a in ("branch_computations", "true_computation", "false_computation") for n in i.called(a)]
            return max(map(self.collectives, names), key=lambda branch: sum(c.wire_bytes for c in branch), default=())
        if i.opcode.endswith(("-update", "-done")):  # of an asynchronous call that was counted at its start
            return ()
        names = [n for a in ("calls", "to_apply", "called_computations") for n in i.called(a)]
        return [c for name in names for c in self.collectives(name)]

    def _loop(self, i: _Instruction, within: str) -> list[Collective]:
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
        return [replace(c, times=c.times * n) for part, n in runs for c in part if n]

    def _own(self, i: _Instruction, within: str) -> list[Collective]:
        if "chain_id=" in i.attributes and not self._starts_chain(i, within):
            return []
        kind, counts, group = i.opcode.removesuffix("-start"), _elements(_result(i)), self._group(i)
        if kind == "all-reduce" and within.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # TPU's fusion; its all-reduce has the shape of the whole
        elif kind == "reduce-scatter":
            counts = {dtype: n * group for dtype, n in counts.items()}
        return [Collective(kind, dtype, n, group) for dtype, n in counts.items()]

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


# ---- memory ----


@dataclass(frozen=True)
class Memory:
    """Bytes of one device while a compiled program runs.

    Attributes:
      argument: the program's arguments.
      output: its results.
      temp: everything in between.
      alias: outputs that lie in the buffers of donated arguments, counted in both.

    >>> Memory(argument=100, output=60, temp=30, alias=50).peak
    140
    """

    argument: int
    output: int
    temp: int
    alias: int

    @property
    def peak(self) -> int:
        """Bytes that the device must have for the program."""
        return self.argument + self.output + self.temp - self.alias


def memory(compiled: jax.stages.Compiled) -> Memory:
    """The memory of a compiled program, as its compiler planned it.

    >>> import jax
    >>> memory(jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()).argument
    16
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend does not say how much memory a compiled program needs")
    names = ("argument", "output", "temp", "alias")
    return Memory(**{name: getattr(stats, f"{name}_size_in_bytes") for name in names})


def live_bytes(tree: Tree) -> dict[jax.Device, int]:  # pyright: ignore[reportInvalidTypeForm]: jaxlib has no stubs
    """The bytes that the arrays of a tree really hold on each of this process's devices, random keys included.

    An array that occurs twice counts twice. Leaves on no device (numpy arrays, numbers) hold nothing.

    >>> import jax.numpy as jnp
    >>> list(live_bytes({"w": jnp.ones((2, 4)), "n": 3}).values())
    [32]
    """
    held: Counter = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in getattr(leaf, "addressable_shards", ()):
            held[shard.device] += shard.data.nbytes
    return dict(held)


# ---- closed formulas ----


def model_state_bytes(parameters: float, devices: int, stage: int) -> float:
    """Peak bytes per device of parameters, gradients and Adam's state in a step, without activations.

    With 2-byte parameters and gradients in the step and 4-byte parameters and moments at rest (arXiv 1910.02054,
    section 5). The paper's stage 3 is 16 bytes per parameter over the devices; here it is 14, since the 2-byte
    parameters are cast from the 4-byte shards and gathered a unit at a time, and no partitioned copy of them is kept.
    The units in flight come on top.

    >>> [model_state_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    [120.0, 31.40625, 16.640625, 1.640625]
    """
    _check(stage, devices)
    whole, shared = ((16, 0), (4, 12), (2, 14), (0, 14))[stage]
    return parameters * (whole + shared / devices)


def at_rest_bytes(parameters: float, devices: int, stage: int) -> float:
    """Bytes per device of the state between steps: 4-byte parameters and Adam's two moments.

    >>> at_rest_bytes(1000, 8, stage=0), at_rest_bytes(1000, 8, stage=1)
    (12000.0, 1500.0)
    """
    _check(stage, devices)
    return 12 * parameters / (devices if stage else 1)


def communication_volume(parameters: float, stage: int, accumulate: int = 1) -> float:
    """Elements that each device sends in a step, for many devices (times ``(N - 1) / N`` for N of them).

    >>> [communication_volume(1000, stage, accumulate=4) for stage in range(4)]
    [2000, 2000, 5000, 12000]
    """
    _check(stage)
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} is not a number of micro-batches; use 1 or more")
    return parameters * (2, 2, 1 + accumulate, 3 * accumulate)[stage]


def _check(stage: int, devices: int = 1):
    if stage not in range(4):
        raise ValueError(f"stage={stage!r} is not one of 0, 1, 2, 3")
    if devices < 1:
        raise ValueError(f"devices={devices!r} is not a number of devices; use 1 or more")


# ---- a step's report ----


@dataclass(frozen=True)
class Report:
    """What the compiler made of a step, per device; print it.

    Attributes:
      memory: bytes while the step runs.
      collectives: in program order.

    >>> gather = Collective("all-gather", "bf16", elements=2**20, group=8, times=24)
    >>> print(Report(Memory(2**20, 2**20, 2**18, 2**20), (gather, gather)))
     memory, a device       bytes
    ------------------------------
     arguments            1.0 MiB
     outputs              1.0 MiB
     temporaries        256.0 KiB
     donated, in both    -1.0 MiB
     peak                 1.2 MiB
    <BLANKLINE>
     collective   dtype    elements   devices   times       sent
    -------------------------------------------------------------
     all-gather   bf16    1,048,576         8      48   84.0 MiB
     total                                         48   84.0 MiB
    """

    memory: Memory
    collectives: tuple[Collective, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in a step."""
        return sum((c.wire_bytes for c in self.collectives), 0.0)

    def to_dict(self) -> dict:
        """Plain numbers and strings, for JSON."""
        collectives = [asdict(c) | {"bytes": c.bytes, "wire_bytes": c.wire_bytes} for c in self.collectives]
        memory = asdict(self.memory) | {"peak": self.memory.peak}
        return {"memory": memory, "collectives": collectives, "wire_bytes": self.wire_bytes}

    def __str__(self):
        m = self.memory
        names = ("arguments", "outputs", "temporaries", "donated, in both", "peak")
        sizes = map(tables.size, (m.argument, m.output, m.temp, -m.alias, m.peak))
        rows = zip(names, sizes, strict=True)
        return f"{tables.render(('memory, a device', 'bytes'), rows)}\n\n{self._collectives()}"

    def _collectives(self) -> str:
        times: Counter = Counter()
        for c in self.collectives:
            times[replace(c, times=1)] += c.times
        rows = [
            (c.kind, c.dtype, f"{c.elements:,}", str(c.group), f"{n:,}", tables.size(n * c.wire_bytes))
            for c, n in times.items()
        ]
        rows.append(("total", "", "", "", f"{sum(times.values()):,}", tables.size(self.wire_bytes)))
        return tables.render(("collective", "dtype", "elements", "devices", "times", "sent"), rows)


def report(step: Any, state: Tree = None, batch: Tree = None) -> Report:
    """Compile a step for these arguments, without running it, and read what the compiler made of it.

    On CPU devices it is compiled with a scheduler that saves memory; the default one there runs as much as possible at
    once, and its figures would say nothing about other backends.

    Args:
      step: what ``make_train_step`` or ``jax.jit`` returned, or a compiled program (state and batch are not used then).
      state: arrays, or shapes with shardings, also of devices that do not exist.
      batch: likewise.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((4,), "float32")
    >>> report(jax.jit(lambda state, batch: state + batch), x, x).memory.peak
    48
    """
    compiled = step if isinstance(step, jax.stages.Compiled) else _compile(step.lower(state, batch), (state, batch))
    text = compiled.as_text()
    if text is None:
        raise ValueError("this backend does not show what it compiled, so collectives cannot be counted")
    return Report(memory(compiled), tuple(collectives(text)))


def _compile(lowered: jax.stages.Lowered, arguments: Tree) -> jax.stages.Compiled:
    """Compiled so that memory is comparable. The devices need not be the default backend's, nor exist."""
    for leaf in jax.tree.leaves((lowered.out_info, arguments)):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            platform = next(iter(sharding.device_set)).platform
            break
    else:
        platform = jax.default_backend()
    return lowered.compile(compiler_options=_CPU_OPTIONS if platform == "cpu" else None)

"""What is alive when a program needs most: exact bytes of programs that can be followed by hand."""

import importlib
import importlib.util

import pytest

from zerojax.cost import liveness

# jaxlib 0.10.0 has it elsewhere
_hlo = importlib.import_module("jaxlib._hlo" if importlib.util.find_spec("jaxlib._hlo") else "jaxlib._jax")

A = 4 * 256  # bytes of f32[256]
PROGRAMS = {}

# Of a chain two are alive at a time; the result lies in the output. What is made element by element lies where that of
# which it is made lay, unless this is read again, or in another order too.
CHAIN = """
f { p = f32[256] parameter(0)
  a = f32[256] negate(p)
  ROOT b = f32[256] sine(a)
}
g { p = f32[256] parameter(0)
  a = f32[256] reverse(p), dimensions={0}
  ROOT b = f32[256] add(a, p)
}
ENTRY main {
  x = f32[256] parameter(0)
  a = f32[256] negate(x)
  b = f32[256] %s
  ROOT d = f32[256] %s
}"""
PROGRAMS["a chain"] = (2, CHAIN % ("reverse(a), dimensions={0}", "negate(b)"))
PROGRAMS["a chain, element by element"] = (1, CHAIN % ("negate(a)", "negate(b)"))
PROGRAMS["a chain, read again"] = (2, CHAIN % ("negate(a)", "add(a, b)"))
PROGRAMS["a chain of fusions"] = (1, CHAIN % ("fusion(a), kind=kLoop, calls=f", "negate(b)"))
PROGRAMS["a chain of fusions in another order"] = (2, CHAIN % ("fusion(a), kind=kLoop, calls=g", "negate(b)"))

# It is read again after the others.
PROGRAMS["a late use of a view"] = (
    3,
    """
ENTRY main {
  x = f32[256] parameter(0)
  a = f32[256] negate(x)
  v = f32[16,16] bitcast(a)
  b = f32[256] negate(x)
  c = f32[256] reverse(b), dimensions={0}
  w = f32[256] bitcast(v)
  ROOT d = f32[256] add(w, c)
}""",
)

# A constant, and what lies in an argument or a result, need nothing.
PROGRAMS["nothing"] = (
    0,
    """
ENTRY main {
  x = f32[256] parameter(0)
  c = f32[256] constant({...})
  v = f32[16,16] bitcast(x)
  a = f32[256] add(x, c)
  ROOT t = (f32[256], f32[16,16]) tuple(a, v)
}""",
)

# The first part is dead while d is made, as only the second is read later.
PROGRAMS["a part of a tuple"] = (
    3,
    """
f { p = f32[256] parameter(0)
  m = f32[512] concatenate(p, p), dimensions={0}
  n = f32[256] negate(p)
  ROOT t = (f32[512], f32[256]) tuple(m, n)
}
ENTRY main {
  x = f32[256] parameter(0)
  t = (f32[512], f32[256]) fusion(x), kind=kLoop, calls=f
  n = f32[256] get-tuple-element(t), index=1
  d = f32[512] concatenate(n, n), dimensions={0}
  m = f32[512] get-tuple-element(t), index=0
  ROOT e = f32[512] concatenate(n, n), dimensions={0}
}""",
)

UPDATE = """
f { p = f32[256] parameter(0)
  u = f32[8] parameter(1)
  i = s32[] parameter(2)
  ROOT s = f32[256] dynamic-update-slice(p, u, i)
}
ENTRY main {
  x = f32[256] parameter(0)
  u = f32[8] parameter(1)
  i = s32[] parameter(2)
  a = f32[256] negate(x)
  b = f32[256] %s
  ROOT c = f32[256] negate(b)
}"""
PROGRAMS["an update in place"] = (1, UPDATE % "dynamic-update-slice(a, u, i)")
PROGRAMS["an update in a fusion"] = (1, UPDATE % "fusion(a, u, i), kind=kLoop, calls=f")

# Carried: a counter, an array that is made anew in each turn, another that is only read. In a turn these two are alive,
# and what is made of them, twice; then as the next value.
LOOP = """
body { p = (s32[], f32[256], f32[256]) parameter(0)
  n = s32[] get-tuple-element(p), index=0
  x = f32[256] get-tuple-element(p), index=1
  w = f32[256] get-tuple-element(p), index=2
  y = f32[512] concatenate(x, w), dimensions={0}
  z = f32[256] slice(y), slice={[0:256]}
  ROOT t = (s32[], f32[256], f32[256]) tuple(n, z, w)
}
condition { p = (s32[], f32[256], f32[256]) parameter(0)
  n = s32[] get-tuple-element(p), index=0
  ROOT b = pred[] compare(n, n), direction=LT
}
ENTRY main {
  x = f32[256] parameter(0)
  i = s32[] constant(0)
  a = f32[256] negate(x)
  w = f32[256] %s
  t = (s32[], f32[256], f32[256]) tuple(i, a, w)
  l = (s32[], f32[256], f32[256]) while(t), condition=condition, body=body
  y = f32[256] get-tuple-element(l), index=1
  ROOT r = f32[256] negate(y)
}"""
PROGRAMS["a loop"] = (4, LOOP % "negate(x)")
PROGRAMS["a loop that reads an argument"] = (3, LOOP % "bitcast(x)")

# What it began with lies in the output.
PROGRAMS["a loop whose result is the program's"] = (3, LOOP.replace("negate(y)", "bitcast(y)") % "negate(x)")

PROGRAMS["one of two branches"] = (
    3,
    """
small { p = f32[256] parameter(0)
  ROOT a = f32[256] negate(p)
}
large { p = f32[256] parameter(0)
  a = f32[512] concatenate(p, p), dimensions={0}
  ROOT b = f32[256] slice(a), slice={[0:256]}
}
ENTRY main {
  x = f32[256] parameter(0)
  i = pred[] parameter(1)
  a = f32[256] negate(x)
  c = f32[256] conditional(i, a, a), true_computation=small, false_computation=large
  ROOT d = f32[256] negate(c)
}""",
)

# Operand and result of a pair are alive until it ends, which makes nothing.
PAIR = """
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY main {
  x = f32[256] parameter(0)
  a = f32[256] negate(x)
  s = %s
  b = f32[256] negate(x)
  c = f32[256] reverse(b), dimensions={0}
  d = f32[%s
  ROOT e = f32[256] slice(d), slice={[0:256]}
}"""
PROGRAMS["a gather beside others"] = (
    5,
    PAIR
    % ("(f32[256], f32[512]) all-gather-start(a), replica_groups={{0,1}}, dimensions={0}", "512] all-gather-done(s)"),
)
PROGRAMS["a sum in place"] = (
    3,
    PAIR % ("f32[256] all-reduce-start(a), replica_groups={{0,1}}, to_apply=sum", "256] all-reduce-done(s)"),
)
PROGRAMS["a copy beside others"] = (4, PAIR % ("(f32[256], f32[256], u32[]) copy-start(a)", "256] copy-done(s)"))


# What lies in other memory than the device's main one needs nothing there.
PROGRAMS["in vector memory"] = (
    1,
    """
ENTRY main {
  x = f32[256] parameter(0)
  a = f32[256]{0:S(1)} negate(x)
  b = f32[256] reverse(a), dimensions={0}
  ROOT c = f32[256] reverse(b), dimensions={0}
}""",
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_by_hand(name):
    arrays, text = PROGRAMS[name]
    module = _hlo.hlo_module_from_text(f"HloModule by_hand, is_scheduled=true\n{text}")
    found = liveness.at_the_peak(module.as_serialized_hlo_module_proto())
    assert sum(buffer.bytes for buffer in found) == pytest.approx(arrays * A, abs=32)  # some numbers beside them
    assert all(buffer.dims in ((256,), (512,)) for buffer in found if buffer.bytes >= A)


def test_buffers_tell_who_made_them_and_who_sums_them():
    text = PAIR % ("f32[256] all-reduce-start(a), replica_groups={{0,1}}, to_apply=sum", "256] all-reduce-done(s)")
    text = text.replace("a = f32[256] negate(x)", 'a = f32[256] negate(x), metadata={op_name="jit(f)/neg"}')
    text = text.replace("to_apply=sum", 'to_apply=sum, metadata={op_name="jit(f)/psum"}')
    module = _hlo.hlo_module_from_text(f"HloModule by_hand, is_scheduled=true\n{text}")
    found = liveness.at_the_peak(module.as_serialized_hlo_module_proto())
    assert {(buffer.scope, buffer.reducer) for buffer in found} == {("jit(f)/neg", "jit(f)/psum"), ("", "")}

"""CPU kernels called from XLA programs: named operands, only the rows asked for, any number of threads.

That each kernel computes what it should is tested beside it; here is the way into a program and back.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.kernels import xla_call
from app.kernels.machine.team import leave, take
from app.kernels.matmul.cpu import PANEL, pack
from app.kernels.matmul.ffi import product
from app.kernels.matmul.quantised import Quantised
from app.kernels.matmul.storing import dequantise, quantise
from app.kernels.xla_call import Floats2, Helpers, Ints1, KernelCall, Number, Real, reader, team_of
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.seeds import rng

#: Bytes of what the header's structs are made of; everything else in them is a pointer or a 64-bit number.
_SIZES = {"XLA_FFI_ExecutionStage": 8, "XLA_FFI_DataType": 8, "XLA_FFI_Extension_Type": 8, "int": 4}


def _offsets(header: str, struct: str) -> dict[str, int]:
    body = re.search(rf"struct {struct} {{(.*?)\n}}", header, re.DOTALL)
    assert body is not None, struct
    at, found = 0, {}
    for declaration in filter(None, (line.strip() for line in re.sub(r"//.*", "", body[1]).split(";"))):
        kind, name = declaration.rsplit(None, 1)
        if kind in ("XLA_FFI_Args", "XLA_FFI_Rets", "XLA_FFI_Attrs", "XLA_FFI_Api_Version", "XLA_FFI_Extension_Base"):
            inner = _offsets(header, kind)
            found |= {f"{name}.{field}": at + offset for field, offset in inner.items()}
            at += -(-(max(inner.values()) + 4) // 8) * 8
            continue
        found[name.lstrip("*")] = at
        at += 8 if name.startswith("*") else _SIZES.get(kind, 8)
    return found


def _laid_out(struct: np.dtype) -> dict[str, int]:
    """Name -> offset, as `_offsets`."""
    assert struct.fields is not None
    found = {}
    for name, (field, offset, *_) in struct.fields.items():
        inner = {"": 0} if field.fields is None else _laid_out(field)
        found |= {f"{name}.{key}".rstrip("."): offset + at for key, at in inner.items()}
    return found


def test_structs_are_those_of_the_installed_header() -> None:
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    for struct, expected in (
        ("XLA_FFI_CallFrame", xla_call.CALL_FRAME), ("XLA_FFI_Buffer", xla_call.BUFFER),
        ("XLA_FFI_Metadata", xla_call.METADATA),
    ):  # fmt: skip
        found, ours = _offsets(header, struct), _laid_out(expected)
        assert {name: found[name] for name in ours} == ours, struct
    extension = _offsets(header, "XLA_FFI_Metadata_Extension")
    ours = _laid_out(xla_call.EXTENSION)
    assert {name.removeprefix("extension_base."): at for name, at in extension.items()} == ours
    numbers = [int(n) for n in re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header)]
    assert tuple(numbers) == xla_call.VERSION


class _Given(NamedTuple):
    factor: Real
    count: Number
    places: Ints1
    x: Floats2
    total: Floats2


class _Found(NamedTuple):
    total: Floats2
    threads: Floats2


_given, _found = reader(_Given), reader(_Found, after=_Given)


def _gather(record: int) -> None:
    """total[t] += factor * x[places[t]] for the first count rows, a row at a time; how many rows a thread took."""
    given, found, team, done = _given(record), _found(record), team_of(record), 0
    row = take(team, 0)
    while row < given.count:
        for i in range(given.x.shape[1]):
            found.total[row, i] += given.factor * given.x[given.places[row], i]
        done += 1
        row = take(team, 0)
    leave(team, 0, given.count, done)
    if done > 0:
        found.threads[take(team, 1), 0] = done


_call = KernelCall("test_gather", _Given, _Found, _gather, {"total": "total"})


def test_values_are_read_by_name_and_results_written_in_place() -> None:
    generator = rng()
    x, total, places = normal(generator, 5, 3), normal(generator, 4, 3), np.array([4, 0, 2, 1], np.int32)

    def program(factor: jax.Array, count: jax.Array, total: jax.Array) -> _Found:
        found: _Found = _call(_Given(factor, count, places, x, total), ((4, 3), (4, 1)))
        return found

    given = jnp.array(total)
    place = given.unsafe_buffer_pointer()
    found = jax.jit(program, donate_argnums=(2,))(jnp.float32(-0.5), jnp.int32(3), given)
    assert found.total.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(found.total[:3], total[:3] + np.float32(-0.5) * x[places[:3]])
    np.testing.assert_array_equal(found.total[3], total[3])


def test_helpers_take_part_in_a_steps_calls_and_in_no_others() -> None:
    """Rows of a long call are taken by several threads, and every row once."""
    x, num_rows = np.ones((1, 2000), np.float32), 4000
    places, zeros = np.zeros(num_rows, np.int32), jnp.zeros((num_rows, 2000))

    @jax.jit
    def program(total: jax.Array) -> _Found:
        operands = _Given(jnp.float32(1), jnp.int32(num_rows), places, x, total)
        found: _Found = _call(operands, (total.shape, (num_rows, 1)))
        return found

    def shares(found: _Found) -> list[float]:
        assert np.array_equal(found.total, np.ones((num_rows, 2000)))
        taken = np.asarray(found.threads)[:4, 0]
        counts = taken[: int(np.argmax(np.cumsum(taken) >= num_rows)) + 1]
        assert counts.sum() == num_rows
        return counts.tolist()

    helpers = Helpers(3)
    try:
        most = 0
        for _ in range(200):  # a busy machine may leave helpers no core for a while
            with helpers.step():
                most = max(most, len(shares(jax.block_until_ready(program(zeros)))))
            if most > 1:
                break
        assert most > 1
        assert len(shares(program(zeros))) == 1
    finally:
        helpers.close()


def test_a_step_that_fails_lets_its_helpers_go() -> None:
    helpers = Helpers(2)
    with pytest.raises(ValueError, match="no program"), helpers.step():
        raise ValueError("no program")
    before = threading.active_count()
    helpers.close()  # waits for threads that would still help
    assert threading.active_count() == before - 1


def _chain(num_layers: int, num_rows: int):  # type: ignore[no-untyped-def]  # a program
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        def multiply(h: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return product(h, w, layer, jnp.int32(num_rows)), None

        return jax.lax.scan(multiply, x, jnp.arange(num_layers, dtype=jnp.int32))[0]

    return jax.jit(chain)


def test_calls_in_a_loop_see_each_others_results() -> None:
    """A hundred calls in one program, run many times: no helper that comes late touches another call's work."""
    generator = rng()
    w = jnp.array(np.stack([pack(normal(generator, 256, 256) / 16) for _ in range(100)]))
    x, run, helpers = normal(generator, 9, 256), _chain(100, 9), Helpers(3)
    first = np.asarray(run(x, w))
    assert np.isfinite(first).all()
    assert np.ptp(first) > 0
    for _ in range(20):
        with helpers.step():
            np.testing.assert_array_equal(run(x, w), first)
    helpers.close()


def test_programs_on_several_threads_at_once_have_their_own_results() -> None:
    generator = rng()
    w = jnp.array(np.stack([pack(normal(generator, 64, 64) / 8) for _ in range(20)]))
    run, helpers = _chain(20, 9), Helpers(2)
    inputs = [normal(generator, 9, 64) for _ in range(4)]
    alone = [np.asarray(run(x, w)) for x in inputs]

    def one(x: np.ndarray) -> np.ndarray:
        with helpers.step():
            return np.asarray(run(x, w))

    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            for found, expected in zip(threads.map(one, inputs), alone, strict=True):
                np.testing.assert_array_equal(found, expected)
    helpers.close()


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), [(0, 16, 8), (1, 40, 33), (5, 16, 64), (13, 100, 24)])
def test_a_product_is_the_definitions_on_real_rows(
    num_rows: int, num_columns: int, depth: int, in_8_bits: bool
) -> None:
    generator = rng()
    x, w = normal(generator, 16, depth), normal(generator, num_columns, depth)
    x[num_rows:] = np.nan
    packed = pack(w)
    stack = np.stack([np.full_like(packed, np.nan), packed])
    if in_8_bits:
        levels = quantise(w)
        w = dequantise(levels).swapaxes(1, 2).reshape(-1, depth)[:num_columns]
        stack = Quantised._make(np.stack([np.zeros_like(part), part]) for part in levels)
    out = np.asarray(jax.jit(product)(x, stack, jnp.int32(1), jnp.int32(num_rows)))
    assert out.shape == (16, -(-num_columns // PANEL) * PANEL)
    expected = x[:num_rows].astype(np.float64) @ w.astype(np.float64).T
    assert relative_error(out[:num_rows, :num_columns], expected) < TOLERANCE["float32"]
    assert not out[:num_rows, num_columns:].any()
    # By construction: a row's bits are those it has alone, in a program of another shape.
    for row in range(num_rows):
        alone = jax.jit(product)(x[row : row + 1], stack, jnp.int32(1), jnp.int32(1))
        np.testing.assert_array_equal(alone[0], out[row])

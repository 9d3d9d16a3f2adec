"""CPU kernels called from XLA programs: the kernels' own bits, only the rows asked for, any number of threads.

That each kernel computes what it should is tested beside it; here is the way into a program and back.
"""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.kernels import xla_call
from app.kernels.linear import ffi as linear
from app.kernels.machine.team import Team, leave, take
from app.kernels.matmul.cpu import pack
from app.kernels.paged_attention import cpu as attention_cpu
from app.kernels.paged_attention import ffi as attention_ffi
from app.kernels.rotary import cpu as rotary_cpu
from tests.kernels.cases import normal
from tests.kernels.test_linear_xla import no_adapters
from tests.seeds import rng

#: Bytes of what the header's structs are made of; everything else in them is a pointer or a 64-bit number.
_SIZES = {"XLA_FFI_ExecutionStage": 8, "XLA_FFI_DataType": 8, "XLA_FFI_Api_Version": 24}


def _offsets(header: str, struct: str) -> dict[str, int]:
    body = re.search(rf"struct {struct} {{(.*?)\n}};", header, re.DOTALL)
    assert body is not None, struct
    text = re.sub(r"//.*", "", body[1])
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", text)
    at, found = 0, {}
    for declaration in filter(None, (line.strip() for line in text.split(";"))):
        kind, name = declaration.rsplit(None, 1)
        if kind in ("XLA_FFI_Args", "XLA_FFI_Rets", "XLA_FFI_Attrs"):
            inner = _offsets(header, kind)
            found |= {f"{name}.{field}": at + offset for field, offset in inner.items()}
            at += max(inner.values()) + 8
            continue
        found[name.lstrip("*")] = at
        at += _SIZES.get(kind, 8)
    return found


def test_offsets_are_those_of_the_installed_header() -> None:
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    for struct, expected in (
        ("XLA_FFI_CallFrame", xla_call.FRAME), ("XLA_FFI_Buffer", xla_call.BUFFER), ("XLA_FFI_Api", xla_call.API),
    ):  # fmt: skip
        found = _offsets(header, struct)
        assert {name: found[name] for name in expected} == expected
    numbers = [int(n) for n in re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header)]
    assert tuple(numbers) == xla_call.VERSION
    assert _offsets(header, "XLA_FFI_Metadata")["api_version"] + 16 == 24


def test_calls_in_a_loop_see_each_others_results() -> None:
    """A hundred calls in one program, run many times: no helper that comes late touches another call's work."""
    generator = rng()
    w = np.stack([pack(normal(generator, 256, 256) / 16) for _ in range(100)])
    x, adapted = normal(generator, 9, 256), no_adapters(1, 256, 256)

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        def add(h: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return linear.add_product(h, h, w, None, layer, jnp.int32(9), adapted, linear.DOWN_PROJ), None

        return jax.lax.scan(add, x, jnp.arange(100))[0]

    run = jax.jit(chain)
    first = np.asarray(run(x, w))
    assert np.isfinite(first).all()
    assert np.ptp(first) > 0
    for _ in range(20):
        assert np.array_equal(run(x, w), first)


def test_calls_handed_to_lingering_threads_reach_each_exactly_once() -> None:
    address, records, stop = xla_call._new_places(), range(10, 310), 10**6
    received: list[int] = []

    def wait() -> None:
        while not received or received[-1] != stop:
            record = xla_call._linger(address)
            if record:
                received.append(record)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for record in records:
        while not xla_call._hand_over(address, record):
            time.sleep(0)
    while len(received) < len(records):
        time.sleep(0)
    received.append(stop)
    for thread in threads:
        thread.join()
    assert sorted(received) == [*records, stop]
    assert not xla_call._hand_over(address, 5), "nobody lingers"
    assert xla_call._linger(address) == 0


def test_programs_on_several_threads_at_once_have_their_own_results() -> None:
    generator = rng()
    w = np.stack([pack(normal(generator, 64, 64) / 8) for _ in range(20)])
    adapted = no_adapters(1, 64, 64)

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        def add(h: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return linear.add_product(h, h, w, None, layer, jnp.int32(9), adapted, linear.DOWN_PROJ), None

        return jax.lax.scan(add, x, jnp.arange(20))[0]

    run = jax.jit(chain)
    inputs = [normal(generator, 9, 64) for _ in range(4)]
    alone = [np.asarray(run(x, w)) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            together = threads.map(lambda x: np.asarray(run(x, w)), inputs)
            for found, expected in zip(together, alone, strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotation_and_attention_have_the_kernels_bits_and_write_memory_in_place(has_norm: bool) -> None:
    generator = rng()
    heads = attention_ffi.Heads(4, 2, 24, 96, 48)
    num_tokens, rows, width = 7, 6, 4 * 24 + 2 * 2 * 24 + 8  # some padding at the end of a row
    qkv = normal(generator, num_tokens, width)
    positions = np.array([3, 4, 5, 0, 1, 9, 63], np.int32)
    tables = np.array([[4], [2], [0]], np.int32)
    kv_slots = np.array([67, 68, 69, 32, 33, 9, 10**6], np.int32)  # the last row is padding
    starts, lens = np.array([0, 3, 5, 6], np.int32), np.array([6, 2, 10], np.int32)
    cos, sin = normal(generator, 2, 64, 12), normal(generator, 2, 64, 12)
    keys, values = normal(generator, 2, 5, 2, 32, 16), normal(generator, 2, 5, 2, 16, 32)
    norms = [normal(generator, 2, 24) if has_norm else None for _ in range(2)]
    tasks = np.zeros((9, 2), np.int32)
    num_tasks = attention_ffi.attention_tasks(starts, tasks)

    adapted = no_adapters(2, 8, 8)
    own = attention_ffi.OwnNorms(adapted.ranks, adapted.extras, jnp.int32(0), np.zeros(num_tokens, np.int32))

    def program(qkv: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
        layer = jnp.int32(1)
        queries = attention_ffi.Queries(
            positions, kv_slots, jnp.int32(rows), tasks, jnp.int32(num_tasks), starts, lens, tables
        )
        return attention_ffi.attend(
            qkv, keys, values, queries, cos, sin, *norms, layer, layer, 1e-5, jnp.float32(0.3), jnp.int32(4), heads, own
        )

    given = jnp.array(keys), jnp.array(values)  # copies: what NumPy owns cannot be given away
    places = [array.unsafe_buffer_pointer() for array in given]
    out, new_keys, new_values = jax.jit(program, donate_argnums=(1, 2))(qkv, *given)
    assert [array.unsafe_buffer_pointer() for array in (new_keys, new_values)] == places

    none = np.empty(0, np.float32)
    q_norm, k_norm = (none if norm is None else norm[1] for norm in norms)
    expected = np.empty((rows, 96), np.float32)
    team = Team(1)
    team.run(
        rotary_cpu.rotate_and_store, 1, qkv[:rows], positions[:rows], kv_slots[:rows], cos[1], sin[1], q_norm, k_norm,
        np.float32(1e-5), keys[1], values[1], 4, 2, 24, 96, 48,
    )  # fmt: skip
    team.run(
        attention_cpu.paged_attention, 1, qkv[:rows], 24, np.float32(0.3), 4, attention_cpu.attention_tasks(starts),
        starts, lens, tables, keys[1], values[1], expected,
    )  # fmt: skip
    assert np.array_equal(new_keys, keys)
    assert np.array_equal(new_values, values)
    assert np.array_equal(out[:rows], expected)


def _add_all(record: int) -> None:
    team, args = xla_call.team_of(record), xla_call.args_of(record)
    num_done = 0
    if take(team, 0) == 0:
        out = xla_call.floats(xla_call.buffer(args, args[0]), (1,))
        out[0] = np.float32(0.0)
        for b in range(args[0]):
            out[0] += xla_call.floats(xla_call.buffer(args, b), (1,))[0]
        num_done = 1
    leave(team, 0, 1, num_done)
    xla_call.leave_record(record)


def test_a_call_may_have_any_number_of_buffers() -> None:
    held = xla_call.register("polylora_test_add_all", xla_call.task(_add_all))
    for count in (1, 3, 200):
        x = normal(rng(), count)
        call = jax.ffi.ffi_call("polylora_test_add_all", jax.ShapeDtypeStruct((1,), np.float32))
        found = jax.jit(call)(jnp.array([count], jnp.int32), *jnp.split(jnp.asarray(x), count))
        assert abs(found[0] - x.sum()) < 1e-3
    del held

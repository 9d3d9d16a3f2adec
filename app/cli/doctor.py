"""`polylora doctor`: checks whether a service would start on this machine, and what it could hold.

Prints one line per check, with a remedy where something is wrong; exits with 0 if nothing is. Starts nothing; downloads
the base model if it is not here yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.cli.adapters import add_config_option
from app.cli.config_file import address_in, read_document, settings_of
from app.cli.preflight import (
    check_cache,
    check_device,
    check_folders,
    check_model,
    check_open_files,
    check_port,
    check_preloaded,
    product_form,
)
from app.cli.ray_env import has_ha_proxy
from app.config import AppConfig
from app.engine.adapters.sandbox.confinement import confinement_gaps
from app.engine.config import CpuConfig, VllmConfig
from app.engine.errors import ConfigError, PolyloraError
from app.engine.models.linear_modules import paged_modules
from app.engine.models.memory_estimate import kv_block_bytes, num_weights, rank_row_bytes
from app.engine.models.spec import ModelSpec
from app.machine_memory import available_bytes, memory_limit_bytes
from app.version import version

_GIB = 1 << 30
#: Memory of one engine process besides weights, KV cache and rank rows: Python, compiled kernels, activations.
PROCESS_BYTES = 900 << 20
_FLOAT32 = 4
#: The rank that adapters are counted by, and PEFT's default targets for Llama and for BERT.
_RANK, _PEFT_TARGETS = 16, ("q_proj", "v_proj", "query", "value")
#: Separator of the lines of one check.
_INDENT = "\n      "


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check whether a service would start here, and what it could hold")
    add_config_option(parser, "a Serve application file")
    parser.add_argument("--host", help="address that the service would listen on instead of the file's")
    parser.add_argument("--port", type=int, help="port that it would listen on instead of the file's")
    parser.set_defaults(run=_doctor)


def memory_lines(spec: ModelSpec, settings: AppConfig, available_bytes: int) -> list[str]:
    """The memory of one CPU engine by purpose, and how many engines this machine has room for.

    Raises ConfigError, with the same lines, if there is no room for what an engine takes at start. KV cache and rank
    rows are taken as they are used.
    """
    at_start, as_used = _start_bytes(spec), _used_bytes(spec, settings)
    start_bytes = sum(at_start.values())
    total = start_bytes + sum(as_used.values())
    fits = available_bytes // total
    lines = [
        f"one engine of {spec.name} takes {_size(start_bytes)} at start, and up to {_size(total)} as it is used:",
        *(f"  {_size(size):>9}  {what}" for what, size in (at_start | as_used).items()),
        f"{_size(available_bytes)} of memory are available: room for {fits} such engine{'' if fits == 1 else 's'}",
    ]
    if not fits:
        lines.append(
            "lower engine.num_kv_blocks, engine.lora_pool_rows or engine.extra_weights_bytes, or the machine may run "
            "out of memory"
        )
    if available_bytes < start_bytes:
        raise ConfigError(_INDENT.join(lines))
    return lines


def adapter_lines(spec: ModelSpec, settings: AppConfig) -> list[str]:
    """How many adapters of rank 16 are resident at once on the device and in host memory: on all modules of the layers,
    and on those that PEFT chooses by default.
    """
    engine, host_bytes = settings.engine, settings.adapters.host_cache_bytes
    row_bytes = rank_row_bytes(spec, 1)
    some_bytes = rank_row_bytes(spec, 1, _PEFT_TARGETS)
    in_pool = engine.lora_pool_rows // _next_power_of_two(max(_RANK, engine.rank_alignment))
    in_pool = in_pool if engine.max_rank >= _RANK else 0
    all_modules = f"all modules of the layers{' but experts' if paged_modules(spec) else ''}"
    lines = [
        f"adapters of rank {_RANK} on the device (engine.lora_pool_rows, max_loras): at least "
        f"{min(in_pool, engine.max_loras - 1)} at a time"
    ]
    if row_bytes:
        lines.append(
            f"in host memory (adapters.host_cache_bytes {_size(host_bytes)}): {host_bytes // (_RANK * 2 * row_bytes)} "
            f"saved in bfloat16 on {all_modules}"
            + (f", {host_bytes // (_RANK * 2 * some_bytes)} on queries and values alone" if some_bytes else "")
            + "; half as many in float32"
        )
    return lines


def limit_line(spec: ModelSpec, settings: AppConfig, limit_bytes: int | None) -> str | None:
    """A sentence if one CPU engine and the host cache may exceed the limit of this container; or None."""
    if limit_bytes is None or not isinstance(settings.engine.device, CpuConfig):
        return None
    engine = _start_bytes(spec) | _used_bytes(spec, settings)
    wanted = sum(engine.values()) + settings.adapters.host_cache_bytes
    if wanted <= limit_bytes:
        return None
    return (
        f"the memory limit here is {_size(limit_bytes)}, and one engine and the host cache take up to {_size(wanted)}: "
        "the kernel would end the engine. Raise the limit, or lower engine.num_kv_blocks, engine.lora_pool_rows, "
        "engine.extra_weights_bytes or adapters.host_cache_bytes; `polylora doctor` lists them"
    )


def sandbox_lines() -> list[str]:
    """What the processes that read adapters and render their chat templates can do here besides that."""
    gaps = confinement_gaps()
    if not gaps:
        return ["adapters are read, and their chat templates rendered, without network and other files"]
    return [f"a process that reads adapters or renders their chat templates {gap}" for gap in gaps]


def _doctor(arguments: argparse.Namespace) -> int:
    print(f"polylora {version()}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs")
    found: list[tuple[tuple[str, int], AppConfig]] = []

    def read() -> str:
        document = read_document(arguments.config)
        settings = settings_of(document, arguments.config)
        found.append((address_in(document, arguments.host, arguments.port), settings))
        return f"{arguments.config}, {settings.model.name}"

    well = [_run_check("settings", read)]
    for address, settings in found:
        well += [_run_check(what, check) for what, check in _checks(address, settings).items()]
    _run_check("disk", lambda: f"{_size(shutil.disk_usage(Path.cwd()).free)} free")
    _run_check(
        "HAProxy", lambda: "comes with Ray" if has_ha_proxy() else "not available; Serve's own proxy takes more CPU"
    )
    _run_check("sandbox", lambda: _INDENT.join(sandbox_lines()))
    return 0 if all(well) else 1


def _checks(address: tuple[str, int], settings: AppConfig) -> Mapping[str, Callable[[], str]]:
    """The checks by name; each returns what it found or raises PolyloraError."""

    def engine() -> str:
        found, form = check_device(settings.engine), product_form(settings.engine)
        if form is None:
            return found
        return f"{found}; it multiplies in {settings.engine.compute} by its {form} form, which passed its self-test"

    def folders() -> str:
        check_folders(settings, os.environ)
        return "can be written"

    def adapters() -> str:
        check_preloaded(settings)
        return f"{len(settings.adapters.preload)} to preload exist"

    def open_files() -> str:
        return check_open_files(os.environ) or "enough for HAProxy's connections"

    def port() -> str:
        host, number = address
        check_port(host, number, "is a service running already (polylora status)? Or choose another port")
        return f"{host}:{number} is free"

    return {
        "engine": engine,
        "folders": folders,
        "adapters": adapters,
        "open files": open_files,
        "port": port,
        "model": lambda: _model(settings),
    }


def _run_check(what: str, check: Callable[[], str]) -> bool:
    try:
        print(f"ok    {what}: {check()}")
    except PolyloraError as error:
        print(f"FAIL  {what}: {error}")
        return False
    return True


def _model(settings: AppConfig) -> str:
    from app.engine.models.download.model_download import resolve_model

    check_cache()
    spec = check_model(settings, resolve_model(settings.model.uri))
    if not isinstance(settings.engine.device, CpuConfig):
        fits = f"{spec.name} is readable{_on_devices(spec, settings)}; whether it fits shows when the engine starts"
        return _INDENT.join([fits, *adapter_lines(spec, settings)])
    limit = limit_line(spec, settings, memory_limit_bytes())
    lines = memory_lines(spec, settings, available_bytes()) + ([limit] if limit else [])
    return _INDENT.join([*lines, *adapter_lines(spec, settings)])


def _start_bytes(spec: ModelSpec) -> dict[str, int]:
    """What a CPU engine takes at its start, by purpose."""
    return {
        "weights; those of a quantised file take a third of it": _FLOAT32 * num_weights(spec),
        "the process itself": PROCESS_BYTES,
    }


def _used_bytes(spec: ModelSpec, settings: AppConfig) -> dict[str, int]:
    """What it takes at most as it is used, by purpose."""
    engine, blocks, rows = settings.engine, settings.engine.num_kv_blocks, settings.engine.lora_pool_rows
    kv_name = f"KV cache: engine.num_kv_blocks {blocks}, {blocks * engine.block_size} tokens at a time"
    block_bytes = kv_block_bytes(spec, engine.block_size, engine.section(CpuConfig).kv_value_bytes)
    kv = {} if spec.encoder else {kv_name: blocks * block_bytes}
    row_bytes = rows * rank_row_bytes(spec, _FLOAT32)
    extra = {"experts' rows, DoRA, whole modules and so on: engine.extra_weights_bytes": engine.extra_weights_bytes}
    return {**kv, f"rank rows: engine.lora_pool_rows {rows}": row_bytes, **extra}


def _on_devices(spec: ModelSpec, settings: AppConfig) -> str:
    """What vLLM takes of each device besides KV memory, in words; nothing for other engines."""
    section = settings.engine.device
    if not isinstance(section, VllmConfig):
        return ""
    value_bytes, shares = _FLOAT32 if section.dtype == "float32" else 2, section.tensor_parallel_size
    weight_bytes = {"": value_bytes, "fp8": 1}.get(section.quantization)
    parts = [] if weight_bytes is None else [f"{_size(weight_bytes * num_weights(spec) // shares)} of weights"]
    parts.append(
        f"{_size(settings.engine.lora_pool_rows * rank_row_bytes(spec, value_bytes) // shares)} of adapter slots"
    )
    return f": about {' and '.join(parts)} on each device"


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"

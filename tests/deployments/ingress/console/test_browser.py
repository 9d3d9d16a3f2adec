"""The console in a real browser: every screen, its main actions, keys, thousands of adapters, a lost replica.

`make test-browser` installs what it needs and runs it. `POLYLORA_BROWSER_PYTHON` is the Python of an environment with
`playwright` and `pillow`, `POLYLORA_AXE` axe-core's axe.min.js, and `POLYLORA_SCREENSHOTS` the folder for pictures.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic_core import to_json

from load_tests.service import free_port
from tests.deployments.ingress.console.fake_service import fake_service, send_traffic, serving

BROWSER_PYTHON = os.environ.get("POLYLORA_BROWSER_PYTHON", "")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
SCRIPT = Path(__file__).parent / "browser_tour.py"

NEEDS_BROWSER = pytest.mark.skipif(
    not (BROWSER_PYTHON and CHROMIUM), reason="set POLYLORA_BROWSER_PYTHON, and install chromium"
)
pytestmark = [pytest.mark.nightly, NEEDS_BROWSER]


@pytest_asyncio.fixture
async def peft_folder(tmp_path: Path) -> Path:
    """A PEFT folder as a browser gets it."""
    folder = tmp_path / "dropped"
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "base",
    }
    (folder / "adapter_config.json").write_bytes(to_json(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {
        name.format("A"): {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        name.format("B"): {"dtype": "F32", "shape": [4, 2], "data_offsets": [32, 64]},
    }
    header = to_json(tensors)
    content = struct.pack("<Q", len(header)) + header + bytes(64)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


async def tour(part: str, url: str, *words: str) -> str:
    """A part of the tour in its own process; what it printed. Raises AssertionError with it."""
    environ = os.environ | {"CHROMIUM": CHROMIUM}
    process = await asyncio.create_subprocess_exec(
        BROWSER_PYTHON, str(SCRIPT), part, url, *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environ,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]
    return output.decode()


async def test_every_screen_and_action_without_keys(tmp_path: Path, peft_folder: Path) -> None:
    async with fake_service(tmp_path) as service, serving(service, free_port()) as url:
        traffic = asyncio.create_task(send_traffic(url))
        await asyncio.sleep(12)
        try:
            await tour("open", url, str(peft_folder))
        finally:
            traffic.cancel()


async def test_projects_keys_and_sign_in(tmp_path: Path) -> None:
    async with fake_service(tmp_path) as service, serving(service, free_port()) as url:
        admin = await service.managed.tenants_client.create_admin_key("first", None, actor="test")
        await tour("keys", url, admin.value)


async def test_thousands_of_adapters(tmp_path: Path) -> None:
    async with fake_service(tmp_path, num_adapters=5000) as service, serving(service, free_port()) as url:
        await tour("many", url)


async def test_a_lost_replica_and_a_lost_service_are_shown(tmp_path: Path) -> None:
    async with fake_service(tmp_path) as service:
        async with serving(service, port := free_port()) as url:
            running = asyncio.create_task(tour("lost", url, str(tmp_path)))

            async def until(name: str) -> None:
                while not (tmp_path / name).exists() and not running.done():
                    await asyncio.sleep(0.1)

            await until("shown")
            service.fleet.drop("replica-1")
            await until("gone")
        assert port
        await running

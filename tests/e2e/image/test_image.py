"""The image as `docker run` starts it: its command, its health check, its way to end."""

from __future__ import annotations

import secrets
from pathlib import Path

from app.config import ADMIN_KEY
from tests.e2e.image.build import Image
from tests.e2e.image.conftest import give
from tests.e2e.image.containers import Container, project_key

URL = "http://127.0.0.1:8000"


def test_a_container_answers_who_has_a_key_and_ends_when_stopped(image: Image, cache: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    give(state, image)
    admin_key = secrets.token_hex(32)
    volumes = dict(zip(image.volumes, (state, cache), strict=True))
    with Container(image, tmp_path / "container", {ADMIN_KEY: admin_key}, mounts=volumes) as container:
        container.start()
        assert container.run(*image.health_command).returncode != 0, "it says that it is ready before it is"
        container.wait(lambda: container.run(*image.health_command).returncode == 0, "health", 900)
        body = {"model": "sql", "messages": [{"role": "user", "content": "How many customers live in Lisbon?"}]}
        answer = container.request(f"{URL}/v1/chat/completions", body)
        assert answer.status == 401, answer.text
        key = project_key(container, admin_key)
        answer = container.request(f"{URL}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        assert answer.status == 200, answer.text
        assert "SELECT COUNT(*) FROM customers WHERE city = 'Lisbon'" in answer.text
        assert container.stop(150) == 0, container.tail()

"""The console's files: their headers, their size, their origin, and that they are part of the package."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tomllib
from pathlib import Path

import httpx
import pytest

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.routes.console import FOLDER, assets
from tests.deployments.http_service import Service

ROOT = Path(__file__).parents[4]
MAX_BYTES = 150_000
OWN_FILES = [path for path in assets() if not path.startswith("vendor/")]


async def test_each_file_is_served_without_a_key_and_with_a_strict_policy(
    http: httpx.AsyncClient,
) -> None:
    for path, asset in assets().items():
        answer = await http.get("/console/" if path == "index.html" else f"/console/{path}")
        assert (answer.status_code, answer.content) == (200, asset.content)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
    types = {path: (await http.get(f"/console/{path}")).headers["content-type"] for path in ("core.js", "style.css")}
    assert types == {"core.js": "text/javascript; charset=utf-8", "style.css": "text/css; charset=utf-8"}


async def test_a_file_is_sent_compressed_and_not_again(http: httpx.AsyncClient) -> None:
    first = await http.get("/console/core.js", headers={"Accept-Encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    again = await http.get("/console/core.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = await http.get("/console/core.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers


async def test_the_page_without_its_slash_leads_to_it_under_any_prefix(http: httpx.AsyncClient) -> None:
    answer = await http.get("/console")
    assert (answer.status_code, answer.headers["location"]) == (307, "console/")


async def test_other_paths_are_not_found_and_no_file_outside_is_read(http: httpx.AsyncClient) -> None:
    for path in ("/console/nothing.js", "/console/../service.py", "/console/%2e%2e/service.py", "/console/screens"):
        assert (await http.get(path)).status_code == 404


async def test_a_link_of_another_site_opens_the_page_and_nothing_else(http: httpx.AsyncClient) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await http.get("/console/", headers=link)).status_code == 200
    assert (await http.get("/v1/loras", headers=link)).status_code == 403
    embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert (await http.get("/console/core.js", headers=embedded)).status_code == 403


async def test_the_console_can_be_turned_off(service: Service) -> None:
    app = make_app(service, HttpPolicy(console=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path in ("/console/", "/console/core.js", "/v1/session"):
            assert (await client.get(path)).status_code == 404


def test_all_files_together_are_small() -> None:
    size = sum(len(gzip.compress(asset.content, 9)) for path, asset in assets().items() if "LICENSES" not in path)
    assert size <= MAX_BYTES, f"{size} bytes compressed"


def test_libraries_are_the_recorded_ones_and_have_licences() -> None:
    record = json.loads((FOLDER / "vendor/vendor.json").read_text())
    licences = (FOLDER / "vendor/LICENSES.txt").read_text()
    present = {path.name for path in (FOLDER / "vendor").iterdir()} - {"vendor.json", "LICENSES.txt"}
    assert present == set(record)
    for name, entry in record.items():
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert f"{entry['package']} {entry['version']}" in licences


@pytest.mark.parametrize("path", OWN_FILES)
def test_nothing_comes_from_elsewhere_and_nothing_is_inline(path: str) -> None:
    text = assets()[path].content.decode()
    for place in re.findall(r"https?://[^\s\"'`)]+", text):
        assert place in ("http://www.w3.org/2000/svg", "https://host/sql-v2/"), place
    for name in re.findall(r"""from "(\.[^"]+)"|import\("(\.[^"]+)"\)""", text):
        local = next(filter(None, name))
        assert (FOLDER / path).parent.joinpath(local).resolve().is_file(), local
    if path == "index.html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
        for each in re.findall(r'(?:href|src)="([^"]+)"', text):
            assert each in assets(), each
    assert not re.search(r"innerHTML|\beval\(|dangerouslySetInnerHTML|new Function", text)


def test_keys_are_kept_out_of_storage_and_urls() -> None:
    text = "".join(assets()[path].content.decode() for path in OWN_FILES)
    assert text.count("localStorage.setItem") == 1, "preferences, by `preference`"
    assert set(re.findall(r'preference\("(\w+)"', text)) == {"theme", "zone"}
    assert "sessionStorage" not in text
    assert "document.cookie" not in text


def test_the_files_are_part_of_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["app"]
    packed = {path for pattern in patterns for path in (ROOT / "app").glob(pattern)}
    assert {FOLDER / path for path in assets()} <= packed

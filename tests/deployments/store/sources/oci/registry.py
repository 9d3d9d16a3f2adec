"""Registries for tests: an imitation by the OCI distribution specification, and Debian's `docker-registry`."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import requests
import zstandard

from load_tests.service import free_port

USER, PASSWORD = "ada", "open sesame"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
MANIFEST, INDEX = "application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.index.v1+json"
FILE, TITLE = "application/vnd.oci.image.layer.v1.tar", "org.opencontainers.image.title"
Answer = tuple[int, dict[str, str], bytes]


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class ImitatedRegistry:
    """Blobs and manifests by (repository, digest or tag). `auth`: "", "basic" or "bearer"; `seen`: what was requested,
    with its Authorization; `answers`: answers in place of the usual ones, by path.
    """

    def __init__(self, auth: str = "") -> None:
        self.auth = auth
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.answers: dict[str, Callable[[], Answer]] = {}
        self.seen: list[tuple[str, str | None]] = []
        self.realm: str | None = None
        self.token_forms: list[dict[str, list[str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.seen.append((unquote(self.path), self.headers["Authorization"]))
                status, headers, answer = outer._answer(self.command, self.path, self.headers, body)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(answer))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    def _answer(self, method: str, url: str, headers: Any, body: bytes) -> Answer:
        parts = urlsplit(url)
        path, query = unquote(parts.path), parse_qs(parts.query)
        if path in self.answers:
            return self.answers[path]()
        if path == "/token":
            return self._token(headers["Authorization"], query | parse_qs(body.decode()))
        if method == "GET" and (refusal := self._refusal(headers["Authorization"])) is not None:
            return refusal
        repository, _, rest = path.removeprefix("/v2/").partition("/blobs/")
        if rest == "uploads/":
            return 202, {"Location": f"/v2/{repository}/blobs/uploads/1?state=x"}, b""
        if rest and method == "PUT":
            assert query["digest"] == [digest_of(body)]
            self.blobs[repository, digest_of(body)] = body
            return 201, {}, b""
        if rest:
            blob = self.blobs.get((repository, rest))
            return (200, {}, blob) if blob is not None else _error(404, "BLOB_UNKNOWN")
        repository, _, reference = path.removeprefix("/v2/").partition("/manifests/")
        if method == "PUT":
            for name in (reference, digest_of(body)):
                self.manifests[repository, name] = (headers["Content-Type"], body)
            return 201, {}, b""
        if (repository, reference) not in self.manifests:
            return _error(404, "MANIFEST_UNKNOWN")
        kind, contents = self.manifests[repository, reference]
        assert kind in headers["Accept"]
        return 200, {"Content-Type": kind, "Docker-Content-Digest": digest_of(contents)}, contents

    def _refusal(self, authorization: str | None) -> Answer | None:
        wanted = {"": authorization, "basic": BASIC, "bearer": "Bearer a-token"}[self.auth]
        if authorization == wanted:
            return None
        realm = self.realm or f"http://{self.host}/token"
        challenge = f'Bearer realm="{realm}",service="registry",scope="repository:x:pull"'
        challenge = 'Basic realm="registry"' if self.auth == "basic" else challenge
        return 401, {"WWW-Authenticate": challenge}, _error(401, "UNAUTHORIZED")[2]

    def _token(self, authorization: str | None, form: dict[str, list[str]]) -> Answer:
        self.token_forms.append(form)
        if authorization != BASIC and form.get("refresh_token") != ["a-refresh-token"]:
            return _error(401, "UNAUTHORIZED")
        return 200, {}, json.dumps({"token": "a-token"}).encode()


def _error(status: int, code: str) -> Answer:
    return status, {}, json.dumps({"errors": [{"code": code, "message": "no"}]}).encode()


class DebianRegistry:
    """Debian's `docker-registry`, in memory, with a password if `auth` is "basic"."""

    def __init__(self, program: str, folder: Path, auth: str = "") -> None:
        self.host = f"127.0.0.1:{free_port()}"
        config: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"inmemory": {}},
            "http": {"addr": self.host, "secret": "x"},
        }
        if auth:
            # bcrypt of PASSWORD
            (folder / "htpasswd").write_text(f"{USER}:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n")
            config["auth"] = {"htpasswd": {"realm": "registry", "path": str(folder / "htpasswd")}}
        (folder / "registry.yml").write_text(json.dumps(config))
        self._process = subprocess.Popen([program, "serve", str(folder / "registry.yml")])
        deadline_s = time.monotonic() + 60
        while True:
            assert self._process.poll() is None
            try:
                requests.get(f"http://{self.host}/v2/", timeout=10)
                return
            except requests.ConnectionError:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)


def push_blob(host: str, repository: str, data: bytes) -> dict[str, Any]:
    """Push a blob as the specification has it; its descriptor."""
    headers = {"Authorization": BASIC}
    start = requests.post(f"http://{host}/v2/{repository}/blobs/uploads/", headers=headers, timeout=60)
    assert start.status_code == 202, start.text
    url = requests.compat.urljoin(start.url, start.headers["Location"])
    done = requests.put(
        url,
        params={"digest": digest_of(data)},
        data=data,
        headers=headers | {"Content-Type": "application/octet-stream"},
        timeout=60,
    )
    assert done.status_code == 201, done.text
    return {"digest": digest_of(data), "size": len(data)}


def push_manifest(host: str, repository: str, tag: str, document: Mapping[str, Any]) -> str:
    """Push a manifest or index; its digest."""
    kind = INDEX if "manifests" in document else MANIFEST
    contents = json.dumps({"schemaVersion": 2, "mediaType": kind} | dict(document)).encode()
    answer = requests.put(
        f"http://{host}/v2/{repository}/manifests/{tag}",
        data=contents,
        headers={"Content-Type": kind, "Authorization": BASIC},
        timeout=60,
    )
    assert answer.status_code == 201, answer.text
    return digest_of(contents)


def push(host: str, repository: str, tag: str, layers: Sequence[tuple[str, dict[str, str], bytes]]) -> str:
    """Push an artifact of (media type, annotations, contents); the manifest's digest."""
    config = push_blob(host, repository, b"{}") | {"mediaType": "application/vnd.oci.empty.v1+json"}
    described = [
        push_blob(host, repository, data) | {"mediaType": kind, "annotations": annotations}
        for kind, annotations, data in layers
    ]
    return push_manifest(host, repository, tag, {"config": config, "layers": described})


def push_files(host: str, repository: str, tag: str, files: Mapping[str, bytes]) -> str:
    """As `oras push` does it: a layer per file."""
    return push(host, repository, tag, [(FILE, {TITLE: name}, data) for name, data in files.items()])


def tar(files: Mapping[str, bytes], compression: str = "", kind: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return compress(buffer.getvalue(), compression)


def compress(data: bytes, compression: str) -> bytes:
    if compression == "gzip":
        return gzip.compress(data)
    return zstandard.compress(data) if compression == "zstd" else data

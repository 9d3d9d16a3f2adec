"""Servers for tests: files over HTTP with a gate and a count; a hub's and Google storage's answers over the same."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FileServer:
    """`files`: path → contents. Paths in `gates` answer when their event is set; `gets` counts GET by path.

    `authorizations`: what was sent as such, by path.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.gates: dict[str, threading.Event] = {}
        self.gets: Counter[str] = Counter()
        self.authorizations: dict[str, str | None] = {}
        self.answer: Callable[[str, str], tuple[int, dict[str, str], bytes]] = self._file
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                outer.gets[path] += 1
                outer.authorizations[path] = self.headers["Authorization"]
                self._answer("GET", path)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer("POST", urlsplit(self.path).path)

            def do_HEAD(self) -> None:
                self._answer("HEAD", unquote(urlsplit(self.path).path))

            def _answer(self, method: str, path: str) -> None:
                if method != "HEAD" and (gate := outer.gates.get(path)):
                    assert gate.wait(600)
                status, headers, body = outer.answer(method, path)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if method != "HEAD":
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has had enough
                        self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _file(self, _method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        body = self.files.get(path)
        return (404, {}, b"") if body is None else (200, {}, body)


class GoogleStorage(FileServer):
    """Objects of Google's storage by `/BUCKET/NAME` in `files`, and a `/token` for whoever asks; 501 for all else."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = self._object

    def _object(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if (method, path) == ("POST", "/token"):
            token = {"access_token": "a-token", "expires_in": 3600, "token_type": "Bearer"}
            return 200, {"Content-Type": "application/json"}, json.dumps(token).encode()
        found = re.fullmatch(r"/download/storage/v1/b/([^/]+)/o/(.+)", path)
        if found is None:
            return 501, {}, path.encode()
        body = self.files.get(f"/{found[1]}/{found[2]}")
        if body is None:
            return 404, {}, b'{"error": {"code": 404, "message": "No such object"}}'
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        return 200, {"X-Goog-Hash": f"md5={digest}"}, body


class HubServer(FileServer):
    """A hub of repositories: `commit(repo, branch, files)` makes a revision."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = self._hub
        self.branches: dict[tuple[str, str], str] = {}
        self.revisions: dict[tuple[str, str], dict[str, bytes]] = {}
        self.extra_sizes: dict[str, int] = {}

    def commit(self, repo: str, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.branches[repo, branch] = sha
        self.revisions[repo, sha] = files
        return sha

    def _hub(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        missing = (404, {"X-Error-Code": "RepoNotFound"}, b"")
        parts = path.strip("/").split("/")
        if parts[0] == "api":  # api/models/ORG/NAME/revision/REV
            repo, revision = "/".join(parts[2:4]), parts[5]
            sha = self.branches.get((repo, revision), revision)
            files = self.revisions.get((repo, sha))
            if files is None:
                return missing
            siblings = [
                {"rfilename": name, "size": self.extra_sizes.get(name, len(data))} for name, data in files.items()
            ]
            body = {"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "private": False, "tags": []}
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        repo, sha, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])  # ORG/NAME/resolve/REV/FILE
        data = self.revisions.get((repo, sha), {}).get(name)
        if data is None:
            return missing
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": sha, "Content-Length": str(len(data))}
        return 200, headers, data if method == "GET" else b""

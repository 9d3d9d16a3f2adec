"""HTTP client for a running service.

A URL may end in /v1, as in OpenAI's clients. `POLYLORA_ADMIN_KEY` or `POLYLORA_MANAGEMENT_TOKEN` is sent if it is set.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from app.config import ADMIN_KEY, MANAGEMENT_TOKEN
from app.engine.errors import PolyloraError

DEFAULT_URL = "http://127.0.0.1:8000"
#: The route that runs models and so takes no admin key.
INFERENCE_ROUTE = "/v1/chat/completions"
#: Longest wait for one answer: a load may include a download.
TIMEOUT_S = 600.0


class ApiError(PolyloraError):
    """The service answered with an error, or did not answer (`answered`)."""

    def __init__(self, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered


class ApiClient:
    """Calls of a service's routes. `timeout_s` is the longest wait for one answer. `project`: the id of the project
    that an admin key manages; "" for none."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, project: str = "") -> None:
        self._timeout_s = timeout_s
        self._project = project
        self._url = url.rstrip("/").removesuffix("/v1")

    def call(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Raises ApiError."""
        with self._answer(method, route, body) as answer:
            decoded: dict[str, Any] = json.load(answer)
            return decoded

    def events(self, route: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON events of a stream, as they come. Raises ApiError, also for an error within the stream."""
        with self._answer("POST", route, body) as answer:
            for line in answer:
                text = line.decode().strip()
                if not text.startswith("data:") or text.endswith("[DONE]"):
                    continue
                event = json.loads(text.removeprefix("data:"))
                if "error" in event:
                    raise ApiError(str(event["error"].get("message")))
                yield event

    @contextmanager
    def _answer(self, method: str, route: str, body: Mapping[str, Any] | None) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(ADMIN_KEY) or os.environ.get(MANAGEMENT_TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        if self._project:
            headers["OpenAI-Project"] = self._project
        try:
            request = urllib.request.Request(self._url + route, data=data, headers=headers, method=method)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(_error_message(error) + _way_out(route, error.code)) from error
        # ValueError: not a URL, or the answer is not JSON; HTTPException: it is not HTTP, or incomplete.
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split())  # it may quote the answer
            raise ApiError(
                f"no answer from {self._url}: {reason}; --url sets the service's address", answered=False
            ) from error

    def list_all(self, route: str, query: str = "limit=1000") -> Iterator[dict[str, Any]]:
        """The rows of all pages of a list. Raises ApiError."""
        after = ""
        while True:
            page = self.call("GET", f"{route}?{query}{after}")
            try:
                rows, has_more, last_id = page["data"], page["has_more"], page["last_id"]
            except (KeyError, TypeError) as error:
                raise ApiError(f"{self._url}{route} is not a list of this service; check --url") from error
            yield from rows
            if not has_more:
                return
            after = "&after=" + urllib.parse.quote(last_id, safe="")


def add_url_option(parser: argparse.ArgumentParser, default: str = DEFAULT_URL) -> None:
    """Add `--url`."""
    parser.add_argument("--url", default=default, help=f"the service; default: {DEFAULT_URL}")


def _way_out(route: str, status: int) -> str:
    """What to do about a key that is missing, wrong or, because an admin key runs no model, of the other kind."""
    if route == INFERENCE_ROUTE:
        return f"; set {ADMIN_KEY} to a project's key for this command" if status in (401, 403) else ""
    return f"; set {ADMIN_KEY} to an admin key" if status == 401 else ""


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}, but not in this service's format; check --url"

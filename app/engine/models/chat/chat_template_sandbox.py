"""A process that renders adapters' chat templates with bounded time and memory.

A template is a program that may loop for hours or fill the memory, so an adapter's template never runs in a process
that serves other tenants. A template that took too long is refused for a while. Starting the process does not count.

`python -m app.engine.models.chat.chat_template_sandbox` is the process: a line of JSON in, a line out.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from app.engine.errors import CheckpointError, InvalidRequest, NotReady
from app.engine.models.chat.chat_template import ChatTemplate

TIMEOUT_S = 2.0
#: Time to start and send `_READY`: a few hundred milliseconds on an idle machine.
START_TIMEOUT_S = 60.0
_READY = b"ready\n"
#: How long a template is refused after it exceeded a limit.
PAUSE_S = 60.0
_MEMORY_BYTES = 1 << 30
_MAX_PROMPT_CHARS = 8 << 20
_PROJECT = Path(__file__).parents[3]


class ChatTemplateSandbox:
    """Thread-safe; renders one conversation at a time. The process starts when first needed."""

    def __init__(self, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: dict[str, float] = {}  # hash of a template → end of its refusal

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, up to where the assistant's answer begins; `extra` as in `ChatTemplate.render`.

        Raises InvalidRequest, and NotReady if the process does not start.
        """
        key = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        task = {"source": source, "special": dict(special_tokens), "messages": list(messages)}
        question = json.dumps(task | {"tools": tools, "extra": dict(extra or {})})
        with self._lock:
            if self._clock() < self._refused.get(key, 0.0):
                raise _over_limit(self._timeout_s)
            answer = self._ask(question.encode() + b"\n")
            if answer is None:
                self.stop()
                now_s = self._clock()
                self._refused = {old: end_s for old, end_s in self._refused.items() if end_s > now_s}
                self._refused[key] = now_s + PAUSE_S
                raise _over_limit(self._timeout_s)
        found = json.loads(answer)
        if "error" in found:
            raise InvalidRequest(found["error"], param="messages")
        return str(found["text"])

    def close(self) -> None:
        with self._lock:
            self.stop()

    def stop(self) -> None:
        """End the process; the caller holds the lock."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, question: bytes) -> bytes | None:
        """The answer's line; None on timeout or if the process died."""
        process = self._process or _start()
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        deadline_s = time.monotonic() + self._timeout_s
        answer, unsent = bytearray(), memoryview(question)
        reads, writes = process.stdout.fileno(), process.stdin.fileno()
        while not answer.endswith(b"\n"):
            can_read, can_write, _ = select.select(
                [reads], [writes] if unsent else [], [], max(deadline_s - time.monotonic(), 0)
            )
            if not can_read and not can_write:
                return None
            try:
                if can_write:
                    unsent = unsent[os.write(writes, unsent[:4096]) :]
                if can_read:
                    piece = os.read(reads, 1 << 16)
                    if not piece:
                        return None
                    answer += piece
            except OSError:
                return None
        return bytes(answer)


def _over_limit(timeout_s: float) -> InvalidRequest:
    return InvalidRequest(
        f"the adapter's chat template takes more than {timeout_s:g} s or {_MEMORY_BYTES >> 20} MiB and is refused for "
        f"{PAUSE_S:g} s; register the adapter with a simpler one",
        param="messages",
    )


def _start() -> subprocess.Popen[bytes]:
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_PROJECT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.engine.models.chat.chat_template_sandbox"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    can_read, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    if not can_read or os.read(process.stdout.fileno(), len(_READY)) != _READY:
        process.kill()
        process.communicate()
        raise NotReady(f"the process for adapters' chat templates has not started within {START_TIMEOUT_S:g} s")
    return process


@lru_cache(maxsize=256)
def _compile(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def _answer(line: bytes) -> dict[str, str]:
    question = json.loads(line)
    try:
        template = _compile(question["source"], tuple(sorted(question["special"].items())))
        text = template.render(question["messages"], tools=question["tools"], extra=question["extra"])
    except (InvalidRequest, CheckpointError) as error:
        return {"error": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"error": f"the adapter's chat template refuses these messages: {type(error).__name__}"}
    if len(text) > _MAX_PROMPT_CHARS:
        return {
            "error": f"the adapter's chat template made {len(text)} characters; at most {_MAX_PROMPT_CHARS} are taken"
        }
    return {"text": text}


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions until the input ends."""
    for line in questions:
        answers.write(json.dumps(_answer(line)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    os.nice(5)
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, sys.stdout.buffer)

"""Processes that render adapters' chat templates with bounded time and memory.

A template is a program that may loop for hours or fill the memory, so an adapter's template never runs in a process
that serves requests. It gets 2 s of processor time, however long a busy machine takes for them. A template that took
too much for a tenant's messages is refused to that tenant for a while; others may use the same template. The processes
can open no file, no connection and no program (`confinement`).

`python -m app.engine.models.chat.chat_template_sandbox SECONDS` is such a process: a line of JSON in, a line out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from app.engine.adapters.sandbox.confinement import confine_process, confinement_gaps
from app.engine.errors import CheckpointError, InvalidRequest, NotReady
from app.engine.models.chat.chat_template import ChatTemplate, load_lazy_modules
from app.engine.models.chat.user_text import UserText, user_ranges

logger = logging.getLogger(__name__)

#: Processor time of one rendering, compiling the template included.
TIMEOUT_S = 2.0
#: Time until an answer, for machines so busy that a process hardly runs. Exceeding it is not the template's fault.
ANSWER_TIMEOUT_S = 30.0
#: Time to start and send `_READY`: a few hundred milliseconds on an idle machine.
START_TIMEOUT_S = 60.0
_READY = b"ready\n"
#: How long a template is refused after it exceeded a limit.
PAUSE_S = 60.0
_MEMORY_BYTES = 1 << 30
_MAX_PROMPT_CHARS = 8 << 20
_NUM_COMPILED = 64
_PROJECT = Path(__file__).parents[4]


class ChatTemplateSandbox:
    """Thread-safe. There are as many processes as conversations have been rendered at a time; one starts when no other
    is idle."""

    def __init__(self, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._refused: dict[tuple[str, str], float] = {}  # (tenant, hash of a template) → end of its refusal
        self._has_started = False

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        tenant_id: str = "",
    ) -> UserText:
        """The prompt, as from `ChatTemplate.render`.

        Raises InvalidRequest, and NotReady if a process does not start or the machine is too busy.
        """
        key = (tenant_id, hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest())
        fields = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "extra": dict(extra or {}),
        }
        question = json.dumps({"source": source, "special": dict(special_tokens), "fields": fields})
        with self._lock:
            if self._clock() < self._refused.get(key, 0.0):
                raise _over_limit(self._timeout_s)
        process = self._take_process()
        try:
            answer = _ask(process, question.encode() + b"\n")
        except BaseException:
            _end(process)
            raise
        if answer is None:
            _end(process)
            with self._lock:
                now_s = self._clock()
                self._refused = {old: end_s for old, end_s in self._refused.items() if end_s > now_s}
                self._refused[key] = now_s + PAUSE_S
            raise _over_limit(self._timeout_s)
        with self._lock:
            self._idle.append(process)
        found = json.loads(answer)
        if "error" in found:
            raise InvalidRequest(found["error"], param="messages")
        return UserText(found["text"], map(tuple, found["ranges"]))

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            _end(process)

    def _take_process(self) -> subprocess.Popen[bytes]:
        """A process that is alive and idle."""
        with self._lock:
            gaps = [] if self._has_started else confinement_gaps()
            self._has_started = True
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        for gap in gaps:
            logger.warning("a process that renders adapters' chat templates %s", gap)
        return _start(self._timeout_s)


def _ask(process: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """The answer's line; None if the process died, as it does above its limits. Raises NotReady after
    `ANSWER_TIMEOUT_S`."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    answer, unsent = bytearray(), memoryview(question)
    reads, writes = process.stdout.fileno(), process.stdin.fileno()
    while not answer.endswith(b"\n"):
        can_read, can_write, _ = select.select(
            [reads], [writes] if unsent else [], [], max(deadline_s - time.monotonic(), 0)
        )
        if not can_read and not can_write:
            raise NotReady(
                f"the adapter's chat template was not rendered within {ANSWER_TIMEOUT_S:g} s; this machine is busy; "
                "send the request again later"
            )
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


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _over_limit(timeout_s: float) -> InvalidRequest:
    return InvalidRequest(
        f"the adapter's chat template takes more than {timeout_s:g} s of processor time or {_MEMORY_BYTES >> 20} MiB "
        f"for these messages and is refused for {PAUSE_S:g} s; send fewer, or register the adapter with a simpler one",
        param="messages",
    )


def _start(timeout_s: float) -> subprocess.Popen[bytes]:
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_PROJECT)}
    if "TZ" in os.environ:
        environment["TZ"] = os.environ["TZ"]
    process = subprocess.Popen(
        [sys.executable, "-m", "app.engine.models.chat.chat_template_sandbox", str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    can_read, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    if not can_read or os.read(process.stdout.fileno(), len(_READY)) != _READY:
        _end(process)
        raise NotReady(f"the process for adapters' chat templates has not started within {START_TIMEOUT_S:g} s")
    return process


@lru_cache(maxsize=_NUM_COMPILED)
def _compile(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def _render(question: Mapping[str, Any]) -> UserText:
    template = _compile(question["source"], tuple(sorted(question["special"].items())))
    return template.render(**question["fields"])


def _answer(line: bytes) -> dict[str, Any]:
    question = json.loads(line)
    try:
        try:
            text = _render(question)
        except MemoryError:  # other templates, compiled before, may hold it
            _compile.cache_clear()
            text = _render(question)
    except (InvalidRequest, CheckpointError) as error:
        return {"error": str(error)}
    except (MemoryError, RecursionError, ImportError) as error:
        return {"error": f"the adapter's chat template refuses these messages: {type(error).__name__}"}
    if len(text) > _MAX_PROMPT_CHARS:
        return {
            "error": f"the adapter's chat template made {len(text)} characters; at most {_MAX_PROMPT_CHARS} are taken"
        }
    return {"text": text, "ranges": user_ranges(text)}


def serve(questions: BinaryIO, answers: BinaryIO, timeout_s: float) -> None:
    """Answer questions until the input ends. A question that takes more processor time ends the process (SIGPROF)."""
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        answers.write(json.dumps(_answer(line)).encode() + b"\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.flush()


if __name__ == "__main__":
    load_lazy_modules()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)
    confine_process()
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))

"""Adapters' templates run in processes of their own, with bounded time, memory and rights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine.adapters.sandbox.confinement import confinement_gaps
from app.engine.errors import InvalidRequest, NotReady
from app.engine.models.chat import chat_template_sandbox as module
from app.engine.models.chat.chat_template_sandbox import PAUSE_S, ChatTemplateSandbox

QUICK = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}>"
HOURS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
#: Takes long for long conversations only.
BY_MESSAGE = "{% for m in messages %}{% for a in range(1000) %}{% endfor %}{% endfor %}done"
CHAT = [{"role": "user", "content": "ab a"}]


@pytest.fixture
def sandbox() -> Iterator[ChatTemplateSandbox]:
    made = ChatTemplateSandbox(timeout_s=0.3)
    yield made
    made.close()


def quick(sandbox: ChatTemplateSandbox, tenant_id: str = "") -> str:
    return sandbox.render(QUICK, {"eos_token": "."}, CHAT, tenant_id=tenant_id)


@pytest.mark.parametrize(
    "template",
    [
        HOURS,
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    ],
    ids=["hours", "memory"],
)
def test_a_template_that_takes_too_much_is_ended_and_refused_for_a_while(template: str) -> None:
    now_s = 0.0
    sandbox = ChatTemplateSandbox(timeout_s=0.5, clock=lambda: now_s)
    try:
        with pytest.raises(InvalidRequest, match=r"takes more than 0.5 s|refuses these messages: MemoryError"):
            sandbox.render(template, {}, CHAT)
        assert quick(sandbox) == "[user] ab a.>", "others go on"
        if template is HOURS:
            with pytest.raises(InvalidRequest, match="is refused for 60 s"):
                sandbox.render(template, {}, CHAT)
            now_s = PAUSE_S
            with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s"):
                sandbox.render(template, {}, CHAT)
    finally:
        sandbox.close()


def test_a_template_is_refused_to_the_tenant_whose_messages_took_too_long_and_to_no_other(
    sandbox: ChatTemplateSandbox,
) -> None:
    with pytest.raises(InvalidRequest, match="takes more than"):
        sandbox.render(BY_MESSAGE, {}, CHAT * 200_000, tenant_id="mallory")
    with pytest.raises(InvalidRequest, match="is refused"):
        sandbox.render(BY_MESSAGE, {}, CHAT, tenant_id="mallory")
    assert sandbox.render(BY_MESSAGE, {}, CHAT, tenant_id="alice") == "done"
    assert quick(sandbox, "mallory") == "[user] ab a.>"


def test_a_busy_machine_is_not_the_templates_fault(
    sandbox: ChatTemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time without the processor does not count; an answer that never comes is an error to try again."""
    quick(sandbox)
    (process,) = sandbox._idle
    os.kill(process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    threading.Timer(0.6, os.kill, (process.pid, signal.SIGCONT)).start()
    assert quick(sandbox) == "[user] ab a.>"
    assert time.monotonic() - began_s > 0.3, "more than the limit, and not the template's"
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(NotReady, match="machine is busy"):
        quick(sandbox)
    monkeypatch.undo()
    assert quick(sandbox) == "[user] ab a.>"


def test_a_slow_rendering_holds_up_no_other(sandbox: ChatTemplateSandbox) -> None:
    sandbox._timeout_s = 8.0  # in which a second process starts and answers, on a busy machine, too
    quick(sandbox)
    errors: list[InvalidRequest] = []

    def attack() -> None:
        try:
            sandbox.render(HOURS, {}, CHAT, tenant_id="mallory")
        except InvalidRequest as error:
            errors.append(error)

    attacker = threading.Thread(target=attack)
    attacker.start()
    while sandbox._idle:
        time.sleep(0.01)
    for _ in range(5):
        assert quick(sandbox, "alice") == "[user] ab a.>"
    assert not errors, "the other rendering still goes on"
    attacker.join()
    assert len(errors) == 1
    assert len(sandbox._idle) == 1


def test_a_process_that_died_while_idle_is_replaced_and_no_template_is_blamed(sandbox: ChatTemplateSandbox) -> None:
    quick(sandbox)
    (process,) = sandbox._idle
    process.kill()
    process.wait()
    assert quick(sandbox) == "[user] ab a.>"


def test_the_time_that_the_process_takes_to_start_is_not_the_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: ChatTemplateSandbox
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nsleep 0.5\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(module.sys, "executable", str(python))
    assert quick(sandbox) == "[user] ab a.>"
    sandbox.close()
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(NotReady, match="has not started"):
        quick(sandbox)


def test_what_a_template_refuses_is_the_requests_error(sandbox: ChatTemplateSandbox) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        sandbox.render("{{ raise_exception('roles must alternate') }}", {}, CHAT)
    with pytest.raises(InvalidRequest, match="does not parse"):
        sandbox.render("{% for", {}, CHAT)
    assert sandbox.render("{{ messages[0].content * 100000 }}", {}, CHAT) == "ab a" * 100000


def test_a_confined_template_has_the_date_and_every_filter(sandbox: ChatTemplateSandbox) -> None:
    """Nothing that a template may use needs a file that was not read before."""
    today = time.strftime("%Y-%m-%d %A")
    written = sandbox.render("{{ strftime_now('%Y-%m-%d %A') }}", {}, CHAT)
    assert written in (today, time.strftime("%Y-%m-%d %A"))
    filters = "|".join(["upper", "urlize", "wordwrap", "pprint", "title", "striptags", "escape", "indent", "urlencode"])
    assert sandbox.render("{{ messages[0].content|" + filters + " }}", {}, CHAT)
    assert sandbox.render("{{ [3, 1]|sort|tojson }}{{ 1.5|round }}{{ 'é'|length }}", {}, CHAT) == "[1, 3]2.01"


@pytest.mark.skipif(bool(confinement_gaps()), reason=f"a process here {confinement_gaps()}")
@pytest.mark.parametrize(
    "attempt", ["open('/etc/passwd')", "socket.socket()", "os.unlink(VICTIM)", "os.execv('/bin/true', ['true'])"]
)
def test_a_template_that_left_the_interpreters_sandbox_still_reaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str
) -> None:
    """The process gets another program: one that does as it likes where it would render."""
    (victim := tmp_path / "victim").write_text("whole")
    source = Path(module.__file__).read_text()
    changed = source.replace("def _render(question: Mapping[str, Any]) -> UserText:\n", f"{_HEAD}    {attempt}\n")
    assert changed != source
    (tmp_path / "main.py").write_text(changed.replace("VICTIM", repr(str(victim))))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "main.py"} "$3"\n')
    python.chmod(0o700)
    monkeypatch.setattr(module.sys, "executable", str(python))
    monkeypatch.setattr(module.subprocess, "Popen", lambda *a, **k: _Popen(*a, **k, stderr=subprocess.PIPE))
    process = module._start(1.0)
    stdout, stderr = process.communicate(b'{"source": ""}\n')
    assert stdout == b""
    assert b"PermissionError" in stderr
    assert victim.read_text() == "whole"


_Popen = subprocess.Popen
_HEAD = "import socket\ndef _render(question):\n"


def test_what_the_kernel_cannot_deny_templates_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sandbox: ChatTemplateSandbox
) -> None:
    monkeypatch.setattr(module, "confinement_gaps", lambda: ["can read every file"])
    with caplog.at_level("WARNING"):
        quick(sandbox)
        sandbox.close()
        quick(sandbox)
    (record,) = caplog.records
    assert record.message == "a process that renders adapters' chat templates can read every file"

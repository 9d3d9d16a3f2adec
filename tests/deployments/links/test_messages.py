"""Processes of two releases understand each other: each reads what the other sends, and calls what the other has."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple

import pytest

from app.deployments.links.frames import pack_frame, unpack_frame
from app.deployments.links.protocol import PROTOCOL
from app.engine.adapters.card import AdapterRef
from app.engine.message import message, message_fields, with_known
from app.engine.request import GenerateRequest, SamplingParams, TokenChunk, Usage
from tests.deployments.links.released import keep

LAST: dict[str, Any] = json.loads(keep.KEPT.read_text())
WHAT_TO_DO = (
    "processes of the last release would not understand this one; raise app.deployments.links.protocol.PROTOCOL, and "
    "run python -m tests.deployments.links.released.keep (that alone, if no release was made since it last ran)"
)


def test_what_was_kept_is_of_this_protocol() -> None:
    assert LAST["protocol"] == PROTOCOL, "run python -m tests.deployments.links.released.keep"


@pytest.mark.parametrize("kind", keep.messages().values(), ids=lambda kind: kind.__qualname__)
def test_whatever_travels_is_pickled_by_name(kind: type) -> None:
    value = keep.sample(kind)
    assert kind.__reduce__.__module__ == message.__module__, f"{kind.__qualname__} travels and is no @message"
    again = pickle.loads(pickle.dumps(value))
    assert again == value
    assert type(again) is kind


@pytest.mark.parametrize("name", LAST["messages"])
def test_this_release_reads_what_the_last_one_sends(name: str) -> None:
    kept = LAST["messages"][name]
    assert name in keep.messages(), WHAT_TO_DO
    kind = keep.messages()[name]
    assert set(keep.required(kind)) <= set(kept["fields"].split()), WHAT_TO_DO
    assert pickle.loads(base64.b64decode(kept["pickle"])) == keep.sample(kind, kept["fields"].split()), WHAT_TO_DO


@pytest.mark.parametrize("name", LAST["messages"])
def test_the_last_release_reads_what_this_one_sends(name: str) -> None:
    kept, kind = LAST["messages"][name], keep.messages()[name]
    known, required = kept["fields"].split(), kept["required"].split()
    old = make_dataclass(
        "Old", [(name, object, field() if name in required else field(default=None)) for name in known], kw_only=True
    )
    value = keep.sample(kind)
    sent = {name: getattr(value, name) for name in message_fields(kind)}
    assert set(required) <= set(sent), WHAT_TO_DO
    read = with_known(old, known, sent)
    assert {name: getattr(read, name) for name in known if name in sent} == {
        name: sent[name] for name in sent if name in known
    }


@pytest.mark.parametrize("part", ["calls", "enums"])
def test_calls_and_enumerations_are_those_of_the_last_release(part: str) -> None:
    today = keep.keep()[part]
    for name, kept in LAST[part].items():
        assert today.get(name) == kept, f"{name}: {WHAT_TO_DO}"


def test_a_field_of_another_release_is_dropped_and_a_missing_one_has_its_default() -> None:
    @message
    class Point(NamedTuple):
        x: int
        y: int = 7

    rebuild, (kind, values) = Point(1, 2).__reduce__()  # type: ignore[misc]
    assert rebuild(kind, values | {"z": 3}) == Point(1, 2)
    assert rebuild(kind, {"x": 1}) == Point(1, 7)
    with pytest.raises(TypeError, match="'x'"):
        rebuild(kind, {"y": 1})


def test_a_mistake_in_a_message_is_not_taken_for_another_release() -> None:
    @message
    @dataclass(frozen=True, slots=True)
    class Checked:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise TypeError("x is negative")

    rebuild, (kind, _) = Checked(1).__reduce__()
    with pytest.raises(TypeError, match="negative"):
        rebuild(kind, {"x": -1})


#: Another release: requests have one field more, in their middle, and chunks lack one; it answers a request and a frame
#: with its own, and says what it has read.
OTHER_RELEASE = """
import base64, pickle, sys
from dataclasses import MISSING, field, fields, make_dataclass
import app.engine.request as module
from app.engine.message import message

def changed(kind, drop=(), add=()):
    old = [(f.name, f.type, field(default=f.default) if f.default is not MISSING else field()) for f in fields(kind)]
    old = [item for item in old if item[0] not in drop]
    new = old[:4] + [(name, object, field(default=value)) for name, value in add] + old[4:]
    made = make_dataclass(kind.__name__, new, frozen=True, slots=True)
    made.__module__ = kind.__module__
    setattr(module, kind.__name__, message(made))
    return made

Request = changed(module.GenerateRequest, add=[("quota", 5)])
Chunk = changed(module.TokenChunk, drop=["matched_stop"], add=[("energy_j", 0.5)])
request, frame = pickle.loads(base64.b64decode(sys.argv[1]))
assert type(request) is Request and request.quota == 5, request
(chunk,) = frame
assert type(chunk) is Chunk and chunk.energy_j == 0.5, chunk
print(base64.b64encode(pickle.dumps([request, [chunk]])).decode())
"""


def test_two_processes_of_different_releases_talk() -> None:
    request = GenerateRequest(
        "r/1", "t", (1, 2), SamplingParams(seed=3), AdapterRef("a", "d" * 64, "t"), cache_salt=b"salt", arrival_s=2.0
    )
    chunk = TokenChunk("r/1", (4,), finish_reason="stop", matched_stop=4, usage=Usage(2, 0, 1))
    sent = base64.b64encode(pickle.dumps([request, unpack_frame(pack_frame([chunk]))])).decode()
    done = subprocess.run(
        [sys.executable, "-c", OTHER_RELEASE, sent], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    came_request, (came_chunk,) = pickle.loads(base64.b64decode(done.stdout))
    assert came_request == request
    assert came_chunk == TokenChunk("r/1", (4,), finish_reason="stop", usage=Usage(2, 0, 1)), "it knows no matched_stop"

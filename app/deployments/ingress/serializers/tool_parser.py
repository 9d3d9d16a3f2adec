"""Streaming parser for tool calls in an answer's text.

The grammar of the answer (`tool_grammar`) guarantees the format. A call that is cut off (`max_tokens`) is reported as
far as it came. The result does not depend on where pieces end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.engine.models.chat.tool_call_formats import ToolCallFormat


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a call; `index` counts from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's JSON arguments."""

    index: int
    piece: str


Piece = str | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolConfig:
    """How a task's answers call tools. `shown_ids`: special tokens that are decoded because calls begin with one."""

    format: ToolCallFormat
    shown_ids: frozenset[int]

    def reader(self, answer_id: str) -> ToolCallReader:
        """A parser for one answer; call ids are derived from `answer_id`."""
        return ToolCallReader(self.format, answer_id)


@dataclass(slots=True)
class ToolCall:
    """A complete call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ToolOutput:
    """A complete answer: its text and its calls."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self.text += piece
            elif isinstance(piece, ToolCallStart):
                self.calls.append(ToolCall(piece.id, piece.name))
            else:
                self.calls[piece.index].arguments += piece.piece


class ToolCallReader:
    """Parser of one answer: a state machine over text, call names and arguments."""

    def __init__(self, form: ToolCallFormat, answer_id: str) -> None:
        self._form = form
        self._answer_id = answer_id
        self._state = self._in_text
        self._buffer = ""
        self._is_first = True
        self._is_last = False
        self._json = _JsonEnd()
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """The pieces that these characters complete; at the end also the buffered text."""
        self._buffer += text
        pieces: list[Piece] = []
        self._is_last = is_last
        while (step := self._state()) is not None:
            pieces += [piece for piece in step if piece != ""]
        return pieces

    def _in_text(self) -> list[Piece] | None:
        """Text up to the first call."""
        form = self._form
        marker = form.opening + form.before
        found = self._buffer.find(marker) if form.marker else (0 if self._buffer.startswith(marker) else -1)
        if found >= 0 and (form.marker or self._is_first):
            text, self._buffer = self._buffer[:found].rstrip("\n"), self._buffer[found + len(marker) :]
            self._state = self._in_name
            return [text]
        num_undecided = 0 if self._is_last else self._num_undecided(marker)
        text = self._buffer[: len(self._buffer) - num_undecided]
        self._buffer = self._buffer[len(text) :]
        self._is_first = self._is_first and not text
        return [text] if text else None

    def _num_undecided(self, marker: str) -> int:
        """Length of the suffix that may begin the marker, including newlines before it, which are not text."""
        text = self._buffer
        if not self._form.marker:
            return len(text) if self._is_first and marker.startswith(text) else 0
        starts = (n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:]))
        marker_start = next(starts, 0)
        before = text[: len(text) - marker_start]
        return marker_start + len(before) - len(before.rstrip("\n"))

    def _in_name(self) -> list[Piece] | None:
        name, found, rest = self._buffer.partition(self._form.between)
        if not found:
            return None
        self._buffer, self._state, self._json = rest, self._in_arguments, _JsonEnd()
        digest = hashlib.sha256(f"{self._answer_id}/{self.num_calls}".encode()).hexdigest()
        prefix = "call_" if self._form.id_chars > 9 else ""
        self.num_calls += 1
        return [ToolCallStart(self.num_calls - 1, prefix + digest[: self._form.id_chars], name)]

    def _in_arguments(self) -> list[Piece] | None:
        if not self._buffer:
            return None
        end = self._json.push(self._buffer)
        if end is not None:
            self._state = self._after_call
        piece, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        return [ToolCallArguments(self.num_calls - 1, piece)]

    def _after_call(self) -> list[Piece] | None:
        """Fixed text between a call and the next one or the end."""
        following = self._form.after + self._form.separator + self._form.before
        if not self._buffer.startswith(following):
            return None
        self._buffer, self._state = self._buffer[len(following) :], self._in_name
        return []


class _JsonEnd:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> int | None:
        """The index after the closing brace, or None if the object continues."""
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None

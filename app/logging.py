"""The service's own log: one file for all its processes on a machine, one line per event.

Records of the loggers under `app` become lines of text or JSON in `polylora.log`, with the time (UTC), the process and
named fields such as adapter, tenant, replica, request. A line is written in one piece, so processes may share the file;
if it is rotated (logrotate), the next line opens a new one. API keys are cut to their prefix. Ray's and Serve's own
logs stay where Ray keeps them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from app.config import LogsConfig
from app.private_folder import UMASK
from app.redaction import escape_control_chars, without_keys

FILE = "polylora.log"
#: Longer lines could be written in two pieces.
MAX_LINE_CHARS = 7000


class LogEvent:
    """A record's message with named fields: `logger.info(LogEvent("adapter loaded", name=...))`."""

    def __init__(self, what: str, **known: Any) -> None:
        self.what = what
        self.known = {name: value for name, value in known.items() if value is not None}

    def __str__(self) -> str:
        return " ".join([self.what, *(f"{name}={_plain(value)}" for name, value in self.known.items())])


def start_log(config: LogsConfig, process: str) -> Path:
    """Make this process write to the log, as `process`; returns the log's path. A later call replaces an earlier one.

    Each process of the service calls it first, so it also sets the process's umask: in a cluster that `ray start`
    started, Ray's umask would be inherited.
    If the folder cannot be written, this is reported on stderr, which is in Ray's own logs then, and nothing is logged.
    A line that cannot be written later is lost; the first one is reported, too.
    """
    os.umask(UMASK)
    path = Path(config.folder) / FILE
    logger = logging.getLogger("app")
    for old in [handler for handler in logger.handlers if isinstance(handler, _LogFile)]:
        logger.removeHandler(old)
        old.close()
    logger.setLevel(config.level)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        _report(path, error)
        return path
    handler.setFormatter((_Json if config.format == "json" else _Text)(process))
    logger.addHandler(handler)
    return path


def _report(path: Path, error: OSError) -> None:
    with suppress(OSError):  # Ray's logs, where stderr goes, may be on the same disk
        print(f"polylora: cannot write the log {path}: {error.strerror}", file=sys.stderr, flush=True)


class _LogFile(WatchedFileHandler):
    """A disk that takes no line costs this line and nothing else; the first one that is lost is reported on stderr."""

    _error: OSError | None = None  # of the last line

    def emit(self, record: logging.LogRecord) -> None:
        before, self._error = self._error, None
        try:
            super().emit(record)
        except OSError:  # a moved or removed file is opened again before the line is written
            self.handleError(record)
        if self._error is not None and before is None:
            _report(Path(self.baseFilename), self._error)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._error = error
        stream, self.stream = self.stream, None  # with what it did not write; the next line opens the file again
        if stream is not None:
            with suppress(OSError):
                stream.close()

    def format(self, record: logging.LogRecord) -> str:
        return without_keys(super().format(record))


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname:<7} {self._process}[{record.process}] "
        line += escape_control_chars(record.getMessage())
        lines = [line, self.formatException(record.exc_info)] if record.exc_info else [line]
        return "\n".join(lines)[:MAX_LINE_CHARS]


class _Json(_Text):
    def format(self, record: logging.LogRecord) -> str:
        happened = record.msg if isinstance(record.msg, LogEvent) else LogEvent(record.getMessage())
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "process": self._process,
            "pid": record.process,
            "message": happened.what[: MAX_LINE_CHARS // 4],
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)[-MAX_LINE_CHARS // 2 :]
        return json.dumps(line | happened.known, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: Any) -> str:
    """A value as one word or in quotes, never on two lines."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    is_word = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_word else json.dumps(text, ensure_ascii=False)

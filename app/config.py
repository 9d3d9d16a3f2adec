"""The service's settings: what `args:` of the Serve application file may say.

In: a mapping (YAML). Out: a frozen `AppConfig`, checked before anything loads; an unknown key is an error. How many
replicas there are and what each may use is Ray Serve's own configuration (`deployments:` in the same file) and is not
repeated here. Environment variables carry secrets and paths only: `LORA_PATH` adds a folder that adapters may be loaded
from, `POLYLORA_STATE_DIR` moves the registry and `POLYLORA_REGISTRY_URL` puts it into another database; a password in
it is for the process of the registry alone. `POLYLORA_MANAGEMENT_TOKEN` and `POLYLORA_ADMIN_KEY`, or their
SHA-256 under the same names with `_SHA256`, are read where an ingress runs and nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.engine.adapters.signing.trusted_keys import PUBLIC_KEY_PATTERN, TrustedKeys
from app.engine.config import EngineConfig, EvictionPolicy
from app.engine.errors import ConfigError
from app.engine.models.download import model_download
from app.suggestions import did_you_mean, settings_at

#: One line of letters, digits, dot, dash and underscore: no path, no colon, nothing to escape with.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
#: Longest text that says what an adapter is for.
MAX_DESCRIPTION_CHARS = 1000
#: A path or URI with {name} in it, or module:function.
RESOLVER_PATTERN = r"^(.*\{name\}.*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"

#: How much traffic to expect for an adapter, 1 being the usual. Bounded, so that sums over all adapters are numbers.
TrafficWeight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]

DEFAULT_MODEL_URI = model_download.DEFAULT_MODEL_URI

#: The environment variable that holds the token of `http.management: token`.
MANAGEMENT_TOKEN = "POLYLORA_MANAGEMENT_TOKEN"

#: The environment variable that holds an admin key, beside those that are in the database.
ADMIN_KEY = "POLYLORA_ADMIN_KEY"

#: What follows either name where the environment holds the SHA-256, in hexadecimal digits, in place of the secret.
DIGEST = "_SHA256"

ManagementAccess = Literal["loopback", "token", "open"]
AuthMode = Literal["auto", "keys", "open"]

#: Engine settings that the adapter store depends on, beside the kind of device.
_STORE_ENGINE_FIELDS = ("lora_pool_rows", "max_loras", "extra_weights_bytes")


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Settings):
    """The base model and what clients call it."""

    uri: str = Field(
        default=DEFAULT_MODEL_URI, description="A folder, a GGUF file, hf://org/name@revision or pypi://..."
    )
    name: str = Field(
        default="smollm2-135m-instruct", pattern=NAME_PATTERN, description="The base model's name in requests."
    )


class PreloadedAdapter(_Settings):
    """An adapter registered when the service starts."""

    name: str = Field(pattern=NAME_PATTERN, description="The name clients use.")
    path: str = Field(description="A folder under one of the roots, or a source URI.")
    description: str | None = Field(
        default=None,
        max_length=MAX_DESCRIPTION_CHARS,
        description='What it is for, as lists show it and model "auto" compares it; by default as its card says.',
    )


class SigningConfig(_Settings):
    """Whose adapters may be registered."""

    required: bool = Field(default=False, description="Refuse adapters that are not signed by a trusted key.")
    trusted_keys: dict[str, tuple[Annotated[str, Field(pattern=PUBLIC_KEY_PATTERN)], ...]] = Field(
        default_factory=dict, description="Public keys (`polylora keygen`) by tenant; without tenants it is 'default'."
    )

    @property
    def trusted(self) -> TrustedKeys:
        return TrustedKeys(self.required, self.trusted_keys)


class AdaptersConfig(_Settings):
    """Where adapters come from and how much host memory they may fill."""

    roots: tuple[str, ...] = Field(
        default=(), description="Folders that adapters may be loaded from; LORA_PATH is added."
    )
    preload: tuple[PreloadedAdapter, ...] = Field(default=(), description="Adapters registered at start.")
    allow_hub: bool = Field(default=True, description="Whether hf://org/name@revision may be loaded.")
    hub_endpoint: str | None = Field(default=None, description="Another hub than HF_ENDPOINT or the public one.")
    urls: tuple[str, ...] = Field(
        default=(), description="Prefixes of URLs that may be loaded: s3://bucket/folder/, gs://..., https://host/..."
    )
    url_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="fsspec's arguments by scheme, such as s3: {endpoint_url: ...}; no secrets."
    )
    custom_fetcher: str | None = Field(
        default=None, description="module:function that fetches other URIs instead of the hub's downloader."
    )
    resolvers: tuple[Annotated[str, Field(pattern=RESOLVER_PATTERN)], ...] | None = Field(
        default=None,
        description="Where to look for adapters that are not registered: paths or URIs with {name}, or "
        "module:function. Default: <LORA_PATH>/{name} if LORA_PATH is set; [] disables this.",
    )
    negative_cache_ttl_s: float = Field(
        default=30.0, gt=0, description="A name that was not found is looked for again after this long."
    )
    source_timeout_s: float = Field(default=300.0, gt=0, description="Longest download of one adapter.")
    max_adapter_bytes: int = Field(default=8 << 30, ge=1 << 10, description="Largest file of weights that is read.")
    max_rank: int = Field(default=4096, ge=1, description="Highest rank that is read.")
    parser_memory_bytes: int = Field(
        default=1 << 30, ge=256 << 20, description="Memory for reading one adapter, beside eight times its size."
    )
    parser_timeout_s: float = Field(
        default=20.0, gt=0, description="Time for reading one adapter, beside a second per 20 MB."
    )
    host_cache_bytes: int = Field(
        default=512 << 20, ge=1 << 20, description="Adapters kept in the object store, in bytes."
    )
    max_pinned_fraction: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Part of rank rows, adapter slots and host memory that pinned adapters may take together.",
    )
    host_eviction: EvictionPolicy = Field(default="lru", description="Who leaves the object store: lru, lfu or cost.")
    disk_cache_bytes: int = Field(default=8 << 30, ge=1 << 20, description="Remote adapters kept on disk, in bytes.")
    signing: SigningConfig = Field(default_factory=SigningConfig)
    disk_eviction: EvictionPolicy = Field(default="cost", description="Who leaves the disk: lru, lfu or cost.")
    state_dir: str = Field(default="~/.local/state/polylora", description="Folder of the registry's database.")
    registry_url: str | None = Field(
        default=None, description="postgresql://user@host/database for a registry elsewhere than in state_dir."
    )

    @field_validator("registry_url")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        if url is not None and url.startswith("postgresql") and url != without_password(url):
            raise ValueError(
                "holds a password, which settings do not: put the URL into POLYLORA_REGISTRY_URL, or the password "
                "into PGPASSWORD or the file that PGPASSFILE names"
            )
        return url

    @field_validator("urls")
    @classmethod
    def _urls_are_prefixes(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            is_plain = re.fullmatch(r"(s3|gs|https?)://[\w.:-]+/([\w.@+=~-]+/)*", url, re.ASCII)
            if not is_plain or "/../" in url or "/./" in url:
                raise ValueError(
                    f"{url!r} is not s3://, gs://, http:// or https:// with a host and a path ending in '/'"
                )
        return urls


class PlacementConfig(_Settings):
    """Which replica serves which adapter."""

    policy: str = Field(
        default="sticky",
        description="A file of app/deployments/placement/policies (sticky keeps an adapter where its rows are; "
        "docs/fleet.md compares them), or the dotted path of a class.",
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="The policy's own settings; they stand in the policy's file."
    )
    min_replicas_per_adapter: int = Field(
        default=1, ge=1, description="Replicas that serve each adapter: with 2, losing one costs no adapter its place."
    )
    prefix_affinity: bool = Field(
        default=True,
        description="Requests for the base, and for adapters with several homes, prefer a replica that has the first "
        "128 tokens of their prompt cached, unless it has much more to do than others (docs/fleet.md).",
    )
    report_interval_s: float = Field(default=1.0, gt=0, description="How often a replica reports when nothing changes.")
    heartbeat_timeout_s: float = Field(
        default=10.0, gt=0, description="A replica silent for this long is taken off the table."
    )

    @model_validator(mode="after")
    def _silence_is_longer(self) -> Self:
        if self.heartbeat_timeout_s < 2 * self.report_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s {self.heartbeat_timeout_s} must be at least twice report_interval_s {self.report_interval_s}"
            )
        return self


class LimitsConfig(_Settings):
    """What one HTTP request may ask for."""

    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="Largest request body in bytes (413 beyond).")
    max_upload_bytes: int = Field(
        default=256 << 20, ge=1024, description="Largest weights that PUT /v1/loras/{name}/weights takes (413 beyond)."
    )
    max_sequences: int = Field(default=64, ge=1, description="Prompts times n of one request.")
    max_logprobs: int = Field(default=20, ge=0, description="Most likely tokens reported per position.")
    max_stop_strings: int = Field(default=16, ge=0, description="Stop strings of one request.")
    request_timeout_s: float = Field(default=600.0, gt=0, description="A request older than this is aborted (504).")
    replica_timeout_s: float = Field(
        default=30.0, gt=0, description="How long a request waits for any replica (503 beyond)."
    )
    max_pending_requests_per_adapter: int = Field(
        default=128, ge=1, description="Requests of one ingress that wait for one adapter to be read (429 beyond)."
    )
    max_pending_cold_requests: int = Field(
        default=512, ge=1, description="Requests of one ingress that wait for adapters to be read (429 beyond)."
    )
    adapter_load_timeout_s: float = Field(
        default=60.0, gt=0, description="How long a request waits for its adapter to be read (503 beyond)."
    )


class StorageConfig(_Settings):
    """What is kept for clients: files, batches, responses. Bytes and counts are each tenant's."""

    max_file_bytes: int = Field(default=100 << 20, ge=1024, description="Largest file that is uploaded (413 beyond).")
    max_tenant_bytes: int = Field(default=1 << 30, ge=1024, description="A tenant's files together (403 beyond).")
    max_batch_lines: int = Field(default=50_000, ge=1, description="Requests of one batch.")
    max_open_batches: int = Field(default=50, ge=1, description="A tenant's batches that have not ended.")
    batch_concurrency: int = Field(
        default=16, ge=1, description="Requests of batches that one ingress has computed at a time."
    )
    store_responses: bool = Field(
        default=False, description="Whether a response is stored whose request does not say (`store`)."
    )
    max_responses: int = Field(default=10_000, ge=1, description="Stored responses: the oldest go for the newest.")
    max_response_bytes: int = Field(default=256 << 20, ge=1024, description="Stored responses together, likewise.")
    days: float = Field(default=30.0, gt=0, le=365, description="How long files and responses are kept at most.")


class SemanticRouterConfig(_Settings):
    """How an adapter is chosen for requests whose model is "auto"."""

    embedder: str | None = Field(
        default=None, description="A small encoder beside the service, as model.uri; by default the base itself."
    )
    threshold: float = Field(
        default=0.6, ge=-1, le=1, description="Lowest cosine of an adapter's description; calibrate it per embedder."
    )
    top_k: int = Field(default=1, ge=1, le=16, description="Adapters chosen at most; several are combined.")


class HttpConfig(_Settings):
    """Who may ask. Where the service listens is Serve's `http_options`."""

    management: ManagementAccess = Field(
        default="loopback",
        description="Who may manage adapters: loopback, requests from the service's own machine; token, who sends "
        "Authorization: Bearer with what POLYLORA_MANAGEMENT_TOKEN holds; open, everybody.",
    )
    auth: AuthMode = Field(
        default="auto",
        description="When a request needs an API key: auto, once there is any key, and before that requests come from "
        "the service's own machine only; keys, always; open, never (a key that is sent is used all the same).",
    )
    allowed_origins: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+$")], ...] = Field(
        default=(),
        description="Other sites whose pages may ask from a browser (CORS), such as https://app.example.com.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Names, beside localhost, by which a service that listens on loopback may be asked."
    )
    ready_at_zero_replicas: bool = Field(
        default=False,
        description="/readyz and /health are 200 while no engine replica runs: for EngineReplica's min_replicas 0, "
        "where the first request has one started and waits for it, limits.replica_timeout_s at most.",
    )


class LogsConfig(_Settings):
    """The service's own log; Ray's and Serve's have settings of their own (`logging_config` of the file)."""

    folder: str = Field(default="", description="Where polylora.log is written; by default logs in adapters.state_dir.")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="What is not written below."
    )
    format: Literal["text", "json"] = Field(default="text", description="Lines for people, or for programs.")
    requests: bool = Field(default=False, description="A line for each HTTP request (an access log).")


class PriceConfig(_Settings):
    """What tokens cost, in dollars per million."""

    input: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False, description="Prompt tokens.")
    cached_input: float = Field(
        default=0.0, ge=0, le=1e6, allow_inf_nan=False, description="Prompt tokens found in the cache."
    )
    output: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False, description="Generated tokens.")


class TenantsConfig(_Settings):
    """What is charged. Who the tenants are, their keys and limits are in the database (`polylora tenants`)."""

    prices: dict[str, PriceConfig] = Field(
        default_factory=dict, description="By name of the base model, or of adapters that cost something else."
    )


class AppConfig(_Settings):
    """Everything `app.main:build` needs."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    adapters: AdaptersConfig = Field(default_factory=AdaptersConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    semantic_router: SemanticRouterConfig = Field(default_factory=SemanticRouterConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    logs: LogsConfig = Field(default_factory=LogsConfig)
    tenants: TenantsConfig = Field(default_factory=TenantsConfig)

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        names = [self.model.name, *(adapter.name for adapter in self.adapters.preload)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name {name!r} is used twice; base model and adapters share one namespace")
        return self

    @property
    def for_store(self) -> AppConfig:
        """What the adapter store is built from, everything else as by default.

        Of the engine it matters how much it holds: pins are checked against that.
        """
        engine = EngineConfig(**self.engine.model_dump(include=set(_STORE_ENGINE_FIELDS)))
        device = type(self.engine.device)()
        return AppConfig(model=self.model, adapters=self.adapters, engine=engine.on(device))

    @property
    def store_key(self) -> str:
        """One for each registry: its database and its base model. Other settings reach the store that there is."""
        place = registry_place(self.adapters)
        return hashlib.sha256(f"{place}\n{self.model.uri}".encode()).hexdigest()[:12]


def registry_place(adapters: AdaptersConfig) -> str:
    """Which database the registry is in, whoever asks there."""
    if adapters.registry_url is None:
        return f"file {adapters.state_dir}"
    url = urlsplit(adapters.registry_url)
    if url.scheme.partition("+")[0] == "sqlite":
        return f"file {url.path}"
    hosts = [value for key, value in parse_qsl(url.query) if key in ("host", "port")]
    return f"{url.scheme.partition('+')[0]} {url.hostname or ''}:{url.port or ''}{url.path} {' '.join(hosts)}"


def usage_folder(config: AppConfig) -> Path:
    """Where processes of one machine keep what they have counted and not told the ledger yet."""
    return Path(config.adapters.state_dir).expanduser() / "usage" / config.store_key


def without_password(url: str) -> str:
    """A database's URL as it may be shown, and told to other processes."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    query = urlencode([(key, value) for key, value in parse_qsl(parts.query) if key != "password"], safe="/")
    return urlunsplit(parts._replace(netloc=user.partition(":")[0] + at + host, query=query))


def load_config(values: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> AppConfig:
    """Check the settings, add the environment's paths and make every path absolute.

    Relative roots start at the working directory. Raises ConfigError naming each bad field, or a root
    that is not a folder, or a path in a home directory that is not known.
    """
    environ = os.environ if environ is None else environ
    try:
        config = AppConfig.model_validate(values)
    except ValidationError as error:
        lines = (_complaint(item["loc"], item["type"], item["msg"]) for item in error.errors())
        raise ConfigError("bad service configuration; " + "; ".join(lines)) from error
    roots = [_absolute(root) for root in config.adapters.roots]
    resolvers = config.adapters.resolvers
    if lora_path := environ.get("LORA_PATH"):
        roots.append(_absolute(lora_path))
        resolvers = (f"{roots[-1]}/{{name}}",) if resolvers is None else resolvers
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"adapters.roots: {root} is not a folder; create it or correct the path (or LORA_PATH)")
    state_dir = _absolute(environ.get("POLYLORA_STATE_DIR") or config.adapters.state_dir)
    adapters = config.adapters.model_copy(
        update={
            "roots": tuple(dict.fromkeys(map(str, roots))),
            "resolvers": resolvers or (),
            "state_dir": str(state_dir),
            "registry_url": without_password(environ["POLYLORA_REGISTRY_URL"])
            if environ.get("POLYLORA_REGISTRY_URL")
            else config.adapters.registry_url,
        }
    )
    folder = str(_absolute(config.logs.folder)) if config.logs.folder else str(state_dir / "logs")
    return config.model_copy(update={"adapters": adapters, "logs": config.logs.model_copy(update={"folder": folder})})


def _complaint(place: tuple[int | str, ...], kind: str, message: str) -> str:
    where = ".".join(map(str, place)) or "args"
    if kind == "extra_forbidden":
        return f"{where} is an unknown key{did_you_mean(str(place[-1]), settings_at(AppConfig, place[:-1]))}"
    return f"{where}: {message}"


def _absolute(path: str) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"{path} begins with a home directory that is not known here; write the path out") from error

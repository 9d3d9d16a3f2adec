"""The service's settings: the `args:` of the Serve application file.

`load_config` checks them before anything loads; an unknown key is an error. The number of replicas and their resources
are Ray Serve's own configuration (`deployments:` in the same file). Environment variables carry secrets and paths only:
`LORA_PATH` adds a folder that adapters may be loaded from, `POLYLORA_STATE_DIR` moves the registry and
`POLYLORA_REGISTRY_URL` puts it into another database; a password in it reaches only the registry's process.
`POLYLORA_MANAGEMENT_TOKEN` and `POLYLORA_ADMIN_KEY`, or their SHA-256 under the same names with `_SHA256`, are read
where an ingress runs and nowhere else; `POLYLORA_SECRETS_KEY` is read where the store runs.
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
from app.engine.config import CpuConfig, EngineConfig, EvictionPolicy, VllmConfig
from app.engine.errors import ConfigError
from app.engine.models.download import model_download
from app.model_names import ModelId, Name
from app.suggestions import complaints

#: Longest description of an adapter.
MAX_DESCRIPTION_CHARS = 1000
#: org/name of the hub, with * and {tenant}.
HUB_PATTERN = r"^([A-Za-z0-9_.*-]|\{tenant\})+/([A-Za-z0-9_.*-]|\{tenant\})+$"
#: A path or URI with {name} in it, or module:function.
RESOLVER_PATTERN = r"^(.*\{name\}.*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"

#: Expected traffic of an adapter, 1 being the usual. Bounded, so that sums over all adapters are finite.
TrafficWeight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]

DEFAULT_MODEL_URI = model_download.DEFAULT_MODEL_URI

#: The environment variable with the token of `http.management: token`.
MANAGEMENT_TOKEN = "POLYLORA_MANAGEMENT_TOKEN"

#: The environment variable with an admin key, in addition to those in the database.
ADMIN_KEY = "POLYLORA_ADMIN_KEY"
#: The environment variable with the secret that projects' hub tokens are encrypted by, where the store runs.
SECRETS_KEY = "POLYLORA_SECRETS_KEY"
#: The address that HAProxy listens on; `polylora serve` sets it, for HAProxy and ingresses.
HTTP_HOST = "POLYLORA_HTTP_HOST"
#: A draining ingress, and a HAProxy that was replaced, may finish everything they have accepted, because only they have
#: the connections: this much longer than the longest request.
INGRESS_DRAIN_MARGIN_S = 30.0

#: Headers that proxies add and clients do not, besides Via and X-Forwarded-For, which HAProxy adds itself.
PROXY_HEADERS = ("Forwarded", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP")

#: Paths whose POST is charged as a request of the caller's limits; all others are calls. HAProxy repeats these, and no
#: other POST, when an ingress is lost before it has answered.
INFERENCE_PATHS = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify",
    "/v1/responses", "/v1/responses/input_tokens",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/route", "/generate", "/tokenize", "/detokenize",
})  # fmt: skip

#: Suffix of either name where the environment holds the secret's SHA-256 in hexadecimal digits instead.
DIGEST = "_SHA256"

ManagementAccess = Literal["loopback", "token", "open"]
AuthMode = Literal["auto", "keys", "open"]

#: Engine settings that the adapter store depends on, in addition to the kind of device.
_STORE_ENGINE_FIELDS = ("lora_pool_rows", "max_loras", "extra_weights_bytes")


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Settings):
    """The base model and its name for clients."""

    uri: str = Field(
        default=DEFAULT_MODEL_URI,
        description="The base model: a folder, a GGUF file, hf://org/name@revision or pypi://...",
    )
    name: Name = Field(default="smollm2-135m-instruct", description="The base model's name in requests.")
    split_special_tokens: bool = Field(
        default=True,
        description="Whether special tokens in messages and tools are plain text; only the chat template writes them.",
    )


class PreloadedAdapter(_Settings):
    """An adapter registered when the service starts."""

    name: Name = Field(description="The name clients use.")
    path: str = Field(description="A folder under one of the roots, or a source URI.")
    description: str | None = Field(
        default=None,
        max_length=MAX_DESCRIPTION_CHARS,
        description='What the adapter is for; shown in lists and compared for model "auto". Default: from its card.',
    )


class SigningConfig(_Settings):
    """Which signatures adapters need."""

    required: bool = Field(default=False, description="Reject adapters that are not signed by a trusted key.")
    trusted_keys: dict[str, tuple[Annotated[str, Field(pattern=PUBLIC_KEY_PATTERN)], ...]] = Field(
        default_factory=dict,
        description="Public keys (`polylora keygen`) by tenant; the tenant is 'default' if there are none.",
    )

    @property
    def trust(self) -> TrustedKeys:
        return TrustedKeys(self.required, self.trusted_keys)


class AdaptersConfig(_Settings):
    """Where adapters come from and how much memory and disk they may use."""

    roots: tuple[str, ...] = Field(
        default=(), description="Folders that adapters may be loaded from; LORA_PATH is added."
    )
    preload: tuple[PreloadedAdapter, ...] = Field(default=(), description="Adapters registered at start.")
    hub: tuple[Annotated[str, Field(pattern=HUB_PATTERN)], ...] | None = Field(
        default=None,
        description="Repositories that may be loaded as hf://org/name@revision: org/name, with * and {tenant} (a "
        "project's id). Default: all, but none by projects; [] disables the hub.",
    )
    hub_endpoint: str | None = Field(
        default=None, description="The hub's URL, instead of HF_ENDPOINT or the public hub."
    )
    urls: tuple[str, ...] = Field(
        default=(),
        description="URL prefixes that may be loaded from: s3://bucket/folder/, gs://..., oci://registry/..., "
        "https://host/...; {tenant} in one is a project's id.",
    )
    url_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Arguments for fsspec by scheme, such as s3: {endpoint_url: ...}; without secrets. oci: "
        "plain_http, token_hosts and allow_private_addresses (docs/how-to/load-adapters.md).",
    )
    custom_fetcher: str | None = Field(
        default=None, description="module:function that downloads URIs of other schemes."
    )
    resolvers: tuple[Annotated[str, Field(pattern=RESOLVER_PATTERN)], ...] | None = Field(
        default=None,
        description="Where to look for adapters that are not registered: paths or URIs with {name}, or "
        "module:function. Default: <LORA_PATH>/{name} if LORA_PATH is set; [] disables this.",
    )
    negative_cache_ttl_s: float = Field(
        default=30.0, gt=0, description="Seconds until a name that was not found is looked up again."
    )
    source_timeout_s: float = Field(
        default=300.0, gt=0, description="Longest download of one adapter, or wait for a local file system, in seconds."
    )
    max_adapter_bytes: int = Field(
        default=8 << 30, ge=1 << 10, description="Largest weights file that is accepted, in bytes."
    )
    max_rank: int = Field(default=4096, ge=1, description="Highest rank that is accepted.")
    parser_memory_bytes: int = Field(
        default=1 << 30,
        ge=256 << 20,
        description="Memory limit for parsing one adapter, in addition to eight times its size.",
    )
    parser_timeout_s: float = Field(
        default=20.0, gt=0, description="Time limit for parsing one adapter, in addition to a second per 20 MB."
    )
    host_cache_bytes: int = Field(
        default=512 << 20,
        ge=1 << 20,
        description="Size of the host cache of adapters (in Ray's object store), in bytes.",
    )
    max_pinned_fraction: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Fraction of rank rows, adapter slots and host memory that pinned adapters may use together.",
    )
    host_eviction: EvictionPolicy = Field(
        default="lru", description="Eviction policy of the host cache: lru, lfu or cost."
    )
    disk_cache_bytes: int = Field(
        default=8 << 30, ge=1 << 20, description="Size of the disk cache of remote adapters, in bytes."
    )
    signing: SigningConfig = Field(default_factory=SigningConfig)
    disk_eviction: EvictionPolicy = Field(
        default="cost", description="Eviction policy of the disk cache: lru, lfu or cost."
    )
    state_dir: str = Field(default="~/.local/state/polylora", description="Folder of the registry's database.")
    registry_url: str | None = Field(
        default=None, description="postgresql://user@host/database, if the registry is not in state_dir."
    )

    @field_validator("registry_url")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        if url is not None and url.startswith("postgresql") and url != without_password(url):
            raise ValueError(
                "holds a password, which settings must not: put the URL into POLYLORA_REGISTRY_URL, or the password "
                "into PGPASSWORD or the file that PGPASSFILE names"
            )
        return url

    @field_validator("urls")
    @classmethod
    def _urls_are_prefixes(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            is_plain = re.fullmatch(
                r"(s3|gs|oci|https?)://[\w.:-]+/([\w.@+=~-]+/)*", url.replace("{tenant}", "t"), re.ASCII
            )
            if not is_plain or "/../" in url or "/./" in url:
                raise ValueError(
                    f"{url!r} is not s3://, gs://, oci://, http:// or https:// with a host and a path ending in '/'"
                )
        return urls


class PlacementConfig(_Settings):
    """Which replica serves which adapter."""

    policy: str = Field(
        default="sticky",
        description="A module of app/deployments/placement/policies (sticky keeps an adapter where its rows are; "
        "docs/how-to/autoscale.md compares them), or the dotted path of a class.",
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="The policy's own settings, which are defined in its module."
    )
    min_replicas_per_adapter: int = Field(
        default=1,
        ge=1,
        description="Replicas assigned to each adapter; with 2, every adapter survives the loss of a replica.",
    )
    prefix_affinity: bool = Field(
        default=True,
        description="Requests for the base model, and for adapters with several replicas, prefer one that has the "
        "first 128 tokens of their prompt cached, unless it is much more loaded (docs/how-to/autoscale.md).",
    )
    report_interval_s: float = Field(
        default=1.0, gt=0, description="Seconds between two reports of a replica when nothing changes."
    )
    heartbeat_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds without a report after which a replica is removed from placement."
    )

    @model_validator(mode="after")
    def _silence_is_longer(self) -> Self:
        if self.heartbeat_timeout_s < 2 * self.report_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s {self.heartbeat_timeout_s} must be at least twice report_interval_s "
                f"{self.report_interval_s}"
            )
        return self


class LimitsConfig(_Settings):
    """Limits of one HTTP request."""

    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="Largest request body in bytes (413 beyond).")
    max_upload_bytes: int = Field(
        default=256 << 20, ge=1024, description="Largest weights that PUT /v1/loras/{name}/weights takes (413 beyond)."
    )
    max_sequences: int = Field(default=64, ge=1, description="Most sequences of one request: prompts times n.")
    max_logprobs: int = Field(default=20, ge=0, description="Most likely tokens reported per position.")
    max_stop_strings: int = Field(default=16, ge=0, description="Most stop strings of one request.")
    request_timeout_s: float = Field(default=600.0, gt=0, description="Seconds after which a request is aborted (504).")
    replica_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that a request waits for a replica (503 beyond)."
    )
    max_pending_requests_per_adapter: int = Field(
        default=128, ge=1, description="Requests of one ingress that may wait for one adapter to load (429 beyond)."
    )
    max_pending_cold_requests: int = Field(
        default=512, ge=1, description="Requests of one ingress that may wait for adapters to load (429 beyond)."
    )
    adapter_load_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds that a request waits for its adapter to load (503 beyond)."
    )


class StorageConfig(_Settings):
    """Stored files, batches and responses of clients. Bytes and counts are per tenant."""

    max_file_bytes: int = Field(default=100 << 20, ge=1024, description="Largest uploaded file, in bytes (413 beyond).")
    max_tenant_bytes: int = Field(
        default=1 << 30, ge=1024, description="Total size of a tenant's files, in bytes (403 beyond)."
    )
    max_batch_lines: int = Field(default=50_000, ge=1, description="Most requests of one batch.")
    max_open_batches: int = Field(default=50, ge=1, description="Most unfinished batches of a tenant.")
    batch_concurrency: int = Field(
        default=16, ge=1, description="Batch requests that one ingress has running at a time."
    )
    store_responses: bool = Field(
        default=False, description="Whether responses are stored if the request has no `store`."
    )
    max_responses: int = Field(default=10_000, ge=1, description="Most stored responses; the oldest are evicted.")
    max_response_bytes: int = Field(
        default=256 << 20, ge=1024, description="Total size of stored responses, in bytes; the oldest are evicted."
    )
    retention_days: float = Field(default=30.0, gt=0, le=365, description="Days until files and responses are deleted.")


class SemanticRouterConfig(_Settings):
    """How an adapter is chosen for requests whose model is "auto"."""

    embedder: str = Field(
        default=model_download.DEFAULT_EMBEDDER_URI,
        description="A small encoder, as in model.uri, which each ingress loads when it is first needed; `base`: the "
        "base model itself.",
    )
    threshold: float = Field(
        default=0.3,
        ge=-1,
        le=1,
        description="Lowest similarity with an adapter's description; the default is for the default embedder.",
    )
    top_k: int = Field(
        default=1, ge=1, le=16, description="Most adapters chosen for one request; several are combined."
    )


class HttpConfig(_Settings):
    """Access control. Where the service listens is Serve's `http_options`."""

    management: ManagementAccess = Field(
        default="loopback",
        description="Who may manage adapters: loopback, requests from the service's own machine; token, requests with "
        "Authorization: Bearer and the token in POLYLORA_MANAGEMENT_TOKEN; open, everybody.",
    )
    auth: AuthMode = Field(
        default="auto",
        description="When a request needs an API key: auto, once there is any key, and until then only requests from "
        "the service's own machine are accepted; keys, always; open, never (a key that is sent is still used).",
    )
    console: bool = Field(default=True, description="Whether the web console is served at /console.")
    allowed_origins: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+$")], ...] = Field(
        default=(),
        description="Origins of web pages that may call the service (CORS), such as https://app.example.com.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Host names that a service on loopback accepts, in addition to localhost."
    )
    require_ray_token: bool = Field(
        default=True,
        description="Whether the service refuses to start in a Ray cluster that other machines reach without a token.",
    )
    ready_at_zero_replicas: bool = Field(
        default=False,
        description="/readyz and /health are 200 while no engine replica runs: for EngineReplica's min_replicas 0, "
        "where the first request starts one and waits for it, for limits.replica_timeout_s at most.",
    )


class LogsConfig(_Settings):
    """The service's own log. Ray's and Serve's logs have their own settings (`logging_config` of the file)."""

    folder: str = Field(default="", description="Folder of polylora.log; default: logs in adapters.state_dir.")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Minimum severity that is logged."
    )
    format: Literal["text", "json"] = Field(default="text", description="Format of the log's lines.")
    requests: bool = Field(default=False, description="Whether each HTTP request is logged (an access log).")


class PriceConfig(_Settings):
    """Token prices in dollars per million."""

    input: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False, description="Price of uncached prompt tokens.")
    cached_input: float = Field(
        default=0.0, ge=0, le=1e6, allow_inf_nan=False, description="Price of cached prompt tokens."
    )
    output: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False, description="Price of generated tokens.")


class DefaultLimitsConfig(_Settings):
    """Limits of a new project until an administrator changes them. `None`: no limit."""

    requests_per_min: int | None = Field(default=None, ge=0, description="Inference requests per minute.")
    tokens_per_min: int | None = Field(default=None, ge=0, description="Tokens per minute.")
    max_concurrent: int | None = Field(default=None, ge=0, lt=2**31, description="Concurrent sequences.")
    max_adapters: int | None = Field(default=None, ge=0, lt=2**31, description="Registered adapters.")
    calls_per_min: int | None = Field(
        default=1200,
        ge=0,
        lt=2**31,
        description="Requests per minute that are not inference (management, files, lists). The bytes of bodies count "
        "as further calls. It also limits an address that sends requests without a valid key.",
    )


class TenantsConfig(_Settings):
    """Prices, and the limits of new projects. Tenants, their keys and limits are in the database
    (`polylora tenants`)."""

    base_uri: str | None = Field(
        default=None,
        description="Set by `bases`: the model.uri of the first base model, whose registry has the projects.",
    )
    base_compute: str = Field(default="float32", description="Set by `bases`: the first base model's arithmetic.")
    default_limits: DefaultLimitsConfig = Field(default_factory=DefaultLimitsConfig)

    prices: dict[ModelId, PriceConfig] = Field(
        default_factory=dict,
        description="Prices by name of the base model or of a public adapter, or `proj_…:name` for a project's own.",
    )


class AppConfig(_Settings):
    """All settings of the service."""

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
        """The settings that the adapter store depends on, everything else at its default.

        Its engine settings are the capacities that pins are checked against.
        """
        device = self.engine.device
        tenants = TenantsConfig(base_uri=self.tenants.base_uri, base_compute=self.tenants.base_compute)
        if isinstance(device, VllmConfig):
            slots = VllmConfig(python="unused", max_loras=device.max_loras, max_lora_rank=device.max_lora_rank)
            engine = EngineConfig(vllm=slots)
        else:
            kept = (
                CpuConfig(**device.model_dump(include={"compute", "weight_dtype", "kv_cache_dtype"}))
                if isinstance(device, CpuConfig)
                else type(device)()
            )
            engine = EngineConfig(**self.engine.model_dump(include=set(_STORE_ENGINE_FIELDS))).on(kept)
        return AppConfig(model=self.model, adapters=self.adapters, engine=engine, tenants=tenants)

    @property
    def store_key(self) -> str:
        """Identifies a registry by its database and base model. A running store gets changes of other settings."""
        return _store_key(self.adapters, self.model.uri, self.engine.arithmetic)

    @property
    def tenants_store_key(self) -> str:
        """The `store_key` of the registry that has the projects."""
        if self.tenants.base_uri is None:
            return self.store_key
        return _store_key(self.adapters, self.tenants.base_uri, self.tenants.base_compute)


def _store_key(adapters: AdaptersConfig, base_uri: str, arithmetic: str) -> str:
    parts = [registry_place(adapters), base_uri] + ([] if arithmetic == "float32" else [arithmetic])
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def registry_place(adapters: AdaptersConfig) -> str:
    """Identifies the registry's database, the same from every process."""
    if adapters.registry_url is None:
        return f"file {adapters.state_dir}"
    url = urlsplit(adapters.registry_url)
    if url.scheme.partition("+")[0] == "sqlite":
        return f"file {url.path}"
    hosts = [value for key, value in parse_qsl(url.query) if key in ("host", "port")]
    return f"{url.scheme.partition('+')[0]} {url.hostname or ''}:{url.port or ''}{url.path} {' '.join(hosts)}"


def usage_folder(config: AppConfig) -> Path:
    """The folder where processes of one machine keep recorded usage until the ledger has it."""
    return Path(config.adapters.state_dir).expanduser() / "usage" / config.tenants_store_key


def without_password(url: str) -> str:
    """A database's URL without its password, to show it or send it to other processes."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    query = urlencode([(key, value) for key, value in parse_qsl(parts.query) if key != "password"], safe="/")
    return urlunsplit(parts._replace(netloc=user.partition(":")[0] + at + host, query=query))


def load_config(values: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> AppConfig:
    """Check the settings, add the environment's paths and make every path absolute.

    Relative roots start at the working directory. Raises ConfigError naming each bad field, a root that is not a
    folder, or a path in an unknown home directory.
    """
    environ = os.environ if environ is None else environ
    try:
        config = AppConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("invalid service configuration; " + complaints(error, AppConfig, "args")) from error
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


def _absolute(path: str) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"{path} begins with an unknown home directory; write the full path") from error

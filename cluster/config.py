"""The application's arguments: Ray Serve LLM's schema, with `ingress` and `scheduler` besides.

    llm_configs:
      - model_loading_config: {model_id: smol, model_source: HuggingFaceTB/SmolLM2-135M-Instruct}
        role: mixed                                   # or two entries of one model_id, prefill and decode
        engine_kwargs: {max_model_len: 2048}          # vLLM's names, see workers.config.EngineConfig
        deployment_config: {num_replicas: 2}          # Ray Serve's deployment options
      # or as many as the load needs, see scheduler.autoscaling; with min_replicas 0 the model sleeps when it is idle:
      # deployment_config: {autoscaling_config: {min_replicas: 0, max_replicas: 4, policy: {policy_kwargs:
      #   {ttft_target: 2.0, utilization: 0.7, kv_utilization: 0.8, tolerance: 0.1}}}}
    ingress: {num_replicas: 1}                        # Ray Serve's deployment options
    scheduler: {max_queued_requests: 1024, max_wake_seconds: 300}
    files: {path: /var/lib/pagedray}                  # of /v1/files and /v1/batches, there with it
    observability: {vllm_metric_names: true}          # see docs/observability.md
    tenants:                                          # without any, everybody may do everything
      - {name: acme, api_keys: [sk-…], weight: 2.0, requests_per_minute: 600}
    tenants: /etc/pagedray/tenants.yaml               # or they stand in a file of their own, with keys that are secret

What Serve LLM takes and we can honor is taken; the rest is refused with its path and the reason, never dropped in
silence. Settings of vLLM's engine that change nothing here are taken with one logged line.
Importing this module loads neither torch nor Ray.
"""

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..scheduler.autoscaling import ScalingOptions
from ..scheduler.errors import ConfigError
from ..scheduler.names import nearest
from ..scheduler.roles import ROLES
from ..scheduler.tenants import Tenant, TenantDirectory, hash_key
from ..workers.config import EngineConfig
from .openai.file_store import FileOptions
from .text.reasoning import READERS

logger = logging.getLogger(__name__)

IMPORT_PATH = "pagedray.cluster.app:build"
_AUTO_REPLICAS = 100  # what Serve takes `num_replicas: auto` for
SCALING_POLICY = "pagedray.cluster.autoscaling:GroupScaling"
_IMPORT_PATHS = (IMPORT_PATH, "ray.serve.llm:build_openai_app", "ray.serve.llm:build_pd_openai_app")
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "mixed"}  # where none is said


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """One model: its public id, its engine, the options of its Serve deployment that the user set, and how its text
    is to be read (`cluster/text`)."""

    model_id: str
    engine: EngineConfig
    deployment: dict[str, Any] = field(default_factory=dict)
    tool_call_parser: str | None = None  # None: what the chat template shows
    reasoning_parser: str | None = None
    role: str = "mixed"  # of its groups: "prefill", "decode"; several deployments of a model differ in it
    where: str = field(default="", compare=False)  # its section, for messages
    scaling: ScalingOptions | None = None  # None: a fixed number of groups, or by a policy that is not ours

    @property
    def may_sleep(self) -> bool:
        """It has no group while nobody wants it."""
        return self.deployment.get("autoscaling_config", {}).get("min_replicas", 1) == 0


@dataclass(frozen=True)
class SchedulerOptions:
    """The global scheduler's bounds."""

    max_queued_requests: int = 1024  # requests of a model that wait for a group; over it: 429
    max_queue_seconds: float = 120.0  # how long one waits before it is given up: 503
    max_wake_seconds: float = 300.0  # the same while its model has no group: one is loading, or is built anew
    migration_limit: int = 3  # worker groups that may be lost with a request before it is given up: 503
    scheduler_shards: int = 1  # actors among whom tenants and models are divided (docs/scheduling.md)


@dataclass(frozen=True)
class ObservabilityOptions:
    """What the application tells of itself, beside `/metrics`."""

    vllm_metric_names: bool = False  # in /metrics, beside ours
    json_logs: bool = False  # ingresses, schedulers and leaders log JSON lines, ingresses one for each request
    otlp_traces_endpoint: str | None = None  # vLLM's name: where an OpenTelemetry collector takes OTLP over HTTP
    trace_sample_ratio: float = 1.0  # of requests that do not come with a trace of their own


@dataclass(frozen=True, slots=True)
class ApplicationConfig:
    """All that `cluster.app.build` needs to know."""

    models: tuple[ModelDeployment, ...]
    ingress: dict[str, Any] = field(default_factory=dict)  # options of the ingress deployment that the user set
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    tenants: tuple[Tenant, ...] = ()
    files: FileOptions | None = None
    observability: ObservabilityOptions = field(default_factory=ObservabilityOptions)

    @classmethod
    def parse(cls, args: Any) -> "ApplicationConfig":
        """Check the application's arguments; `ConfigError` with the path, the value and what would be right."""
        root = _read(_Application, args, "")
        sections = [(f"llm_configs[{i}]", raw) for i, raw in enumerate(root.llm_configs or ())]
        if root.llm_configs is None or root.prefill_config is not None or root.decode_config is not None:
            sections += _by_role(root)
        if not sections:
            raise ConfigError("llm_configs is empty: it must hold at least one model")
        if root.ingress and root.ingress_deployment_config:
            raise ConfigError("ingress and ingress_deployment_config are two names of one thing: keep one")
        where = "ingress" if root.ingress else "ingress_deployment_config"
        ingress = _options(root.ingress or root.ingress_deployment_config, where)
        models: list[ModelDeployment] = []
        seen: dict[str, list[tuple[str, ModelDeployment]]] = {}
        for path, raw in sections:
            if isinstance(raw, str):
                raw = _load(Path(raw))
            section = _read(_LLMConfig, raw, path)
            model = _model(section, path)
            for where, other in seen.get(model.model_id, []):
                _check_same(model, path, other, where)
            seen.setdefault(model.model_id, []).append((path, model))
            models.append(model)
            replicas = section.experimental_configs.get("num_ingress_replicas", 0)
            if replicas > ingress.get("num_replicas", 0) and "autoscaling_config" not in ingress:
                ingress["num_replicas"] = replicas
        _share_hub_token(models, ingress)
        scheduler = _read(_Scheduler, root.scheduler, "scheduler")
        if scheduler.scheduler_shards > 1 and any(model.scaling for model in models):
            at = f"scheduler.scheduler_shards is {scheduler.scheduler_shards}"
            raise ConfigError(f"{at}: with autoscaling_config there is one scheduler, which knows the whole load")
        listed = root.tenants
        if isinstance(listed, str):
            listed = _read(_TenantsFile, _load(Path(listed), "tenants"), listed).tenants
        tenants = tuple(_tenant(raw, f"tenants[{i}]", seen) for i, raw in enumerate(listed))
        names = [t.name for t in tenants]
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise ConfigError(f"tenants has {twice!r} twice: names must differ")
        TenantDirectory(tenants)  # says where two have the same key
        files = _files(root.files) if root.files else None
        observability = _read(_Observability, root.observability, "observability")
        return cls(
            tuple(models),
            ingress,
            SchedulerOptions(**scheduler.model_dump()),
            tenants,
            files,
            ObservabilityOptions(**observability.model_dump()),
        )

    @staticmethod
    def for_model(model: str, served_model_name: str | None = None, engine_kwargs: dict | None = None) -> dict:
        """The arguments that serve one model: `model` is a folder, a .gguf file or a hub id."""
        if served_model_name is None:
            path = Path(model)
            local = path.exists()
            served_model_name = (path.stem if path.suffix == ".gguf" else path.resolve().name) if local else model
        loading = {"model_id": served_model_name, "model_source": model}
        return {"llm_configs": [{"model_loading_config": loading, "engine_kwargs": dict(engine_kwargs or {})}]}


def check_split(engine: EngineConfig, where: str) -> None:
    """Raise `ConfigError`, saying what would work, where the model cannot be split over that many ranks.

    Reads the headers of a model that is here. One that would have to be fetched is checked when its group starts.
    """
    if engine.world_size == 1 or not Path(engine.model).expanduser().exists():
        return
    from ..workers.checkpoint.load import open_checkpoint
    from ..workers.partition import check_degrees

    try:
        check_degrees(open_checkpoint(engine.model).config, engine)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None


# The schema. Every section forbids what it does not name; `refused` says why a name that Serve LLM knows is not taken.


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    refused: ClassVar[dict[str, str]] = {}


class _Application(_Section):
    llm_configs: list[Any] | None = None
    prefill_config: Any = None  # Serve LLM's names for two of `llm_configs` with roles
    decode_config: Any = None
    ingress: dict[str, Any] = {}
    ingress_deployment_config: dict[str, Any] = {}  # Serve LLM's name for `ingress`
    scheduler: dict[str, Any] = {}
    tenants: Any = []
    files: dict[str, Any] = {}
    observability: dict[str, Any] = {}
    refused = {
        "ingress_cls_config": "PagedRay has its own ingress",
        "proxy_cls_config": "the ingress hands requests over itself",
        "proxy_deployment_config": "the ingress hands requests over itself",
    }

    @field_validator("tenants")
    @classmethod
    def _list_or_path(cls, value: Any) -> Any:
        if isinstance(value, list) or (isinstance(value, str) and value):
            return value
        raise ValueError("must be a list of tenants, or the path of a file that has one")


class _TenantsFile(_Section):
    tenants: Annotated[list[Any], Field(min_length=1)]  # none would let everybody in


class _Scheduler(_Section):
    max_queued_requests: int = Field(SchedulerOptions.max_queued_requests, ge=1)
    max_queue_seconds: float = Field(SchedulerOptions.max_queue_seconds, gt=0)
    max_wake_seconds: float = Field(SchedulerOptions.max_wake_seconds, gt=0)
    migration_limit: int = Field(SchedulerOptions.migration_limit, ge=0)
    scheduler_shards: int = Field(SchedulerOptions.scheduler_shards, ge=1, le=64)


class _Files(_Section):
    path: str = Field(min_length=1)
    max_file_bytes: int = Field(FileOptions.max_file_bytes, ge=1)
    max_tenant_bytes: int = Field(FileOptions.max_tenant_bytes, ge=1)
    max_tenant_files: int = Field(FileOptions.max_tenant_files, ge=1)
    max_batch_requests: int = Field(FileOptions.max_batch_requests, ge=1)
    batch_concurrency: int = Field(FileOptions.batch_concurrency, ge=1)
    max_running_batches: int = Field(FileOptions.max_running_batches, ge=1)


def _files(raw: dict[str, Any]) -> FileOptions:
    options = FileOptions(**_read(_Files, raw, "files").model_dump())
    if not Path(options.path).expanduser().is_absolute():  # an ingress has a working folder of its own
        raise ConfigError(f"files.path must be an absolute path, not {options.path!r}")
    return options


class _Observability(_Section):
    vllm_metric_names: bool = ObservabilityOptions.vllm_metric_names
    json_logs: bool = ObservabilityOptions.json_logs
    otlp_traces_endpoint: str | None = None
    trace_sample_ratio: float = Field(ObservabilityOptions.trace_sample_ratio, ge=0, le=1)

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must be a URL such as http://collector:4318/v1/traces")
        return value


class _TenantSection(_Section):
    name: str = Field(min_length=1)
    api_keys: list[Annotated[str, Field(min_length=8)]] = []
    api_key_hashes: list[str] = []  # SHA-256, in hex
    weight: float = Field(1.0, gt=0)
    max_concurrent_requests: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_queued_requests: int | None = Field(None, ge=1)
    models: list[str] = []
    priority_class: str = "standard"
    cache_salt: str = ""
    shared_prefix: bool = False
    operator: bool = False


def _tenant(raw: Any, path: str, models: Iterable[str]) -> Tenant:
    """The tenant of one section. Of its keys, hashes are kept."""
    fields = _read(_TenantSection, raw, path).model_dump()
    for model in fields["models"]:
        if model not in models:
            raise ConfigError(f"{path}.models has {model!r}, which is not served{nearest(model, models)}")
    hashes = (*map(hash_key, fields.pop("api_keys")), *fields.pop("api_key_hashes"))
    try:
        return Tenant(**{**fields, "models": tuple(fields["models"]), "key_hashes": hashes})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


class _LLMConfig(_Section):
    model_loading_config: dict[str, Any]
    engine_kwargs: dict[str, Any] = {}
    deployment_config: dict[str, Any] = {}
    placement_group_config: dict[str, Any] | None = None
    accelerator_type: Annotated[str, Field(min_length=1)] | None = None
    accelerator_config: dict[str, Any] | None = None
    runtime_env: dict[str, Any] | None = None
    experimental_configs: dict[str, Any] = {}
    llm_engine: str | None = None
    log_engine_metrics: bool | None = None
    role: str | None = None
    refused = {
        "lora_config": "adapters are not supported yet",
        "server_cls": "PagedRay has its own server",
        "callback_config": "there are no callbacks",
    }

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: str | None) -> str | None:
        if value is not None and value not in ROLES:
            raise ValueError(f"must be {' or '.join(ROLES)}")
        return value


class _ModelLoading(_Section):
    model_id: str = Field(min_length=1)
    model_source: Annotated[str, Field(min_length=1)] | None = None
    tokenizer_source: Annotated[str, Field(min_length=1)] | None = None

    @field_validator("model_source", mode="before")
    @classmethod
    def _no_mirror(cls, value: Any) -> Any:
        remote = ("s3://", "gs://", "abfss://", "azure://", "http://", "https://")
        if isinstance(value, dict) or (isinstance(value, str) and value.startswith(remote)):
            raise ValueError("must be a folder, a .gguf file or a hub id (mirrors in object stores are not supported)")
        return value


class _Http(_Section):
    host: str = "127.0.0.1"
    port: int = 8000


class _Accelerator(_Section):
    kind: str | None = None

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value not in (None, "cpu", "gpu"):
            raise ValueError("must be cpu or gpu")
        return value


class _PlacementGroup(_Section):
    bundle_per_worker: dict[str, float] | None = None
    bundles: list[dict[str, float]] | None = None
    strategy: str = "PACK"

    @field_validator("strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"):
            raise ValueError("must be PACK, STRICT_PACK, SPREAD or STRICT_SPREAD")
        return value


class _Experimental(_Section):
    num_ingress_replicas: int = Field(1, ge=1)
    stream_batching_interval_ms: float | None = None


class _ActorOptions(_Section):
    num_cpus: float | None = Field(None, ge=0)
    num_gpus: float | None = Field(None, ge=0)
    memory: float | None = Field(None, gt=0)
    resources: dict[str, float] | None = None
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None
    refused = {
        "label_selector": "say what a group needs with resources",
        "fallback_strategy": "say what a group needs with resources",
    }


class _Autoscaling(_Section):
    min_replicas: int | None = Field(None, ge=0)
    initial_replicas: int | None = Field(None, ge=0)
    max_replicas: int | None = Field(None, ge=1)
    target_ongoing_requests: float | None = Field(None, gt=0)
    metrics_interval_s: float | None = Field(None, gt=0)
    look_back_period_s: float | None = Field(None, gt=0)
    smoothing_factor: float | None = Field(None, gt=0)
    upscale_smoothing_factor: float | None = Field(None, gt=0)
    downscale_smoothing_factor: float | None = Field(None, gt=0)
    upscaling_factor: float | None = Field(None, gt=0)
    downscaling_factor: float | None = Field(None, gt=0)
    upscale_delay_s: float | None = Field(None, ge=0)
    downscale_delay_s: float | None = Field(None, ge=0)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0)
    aggregation_function: str | None = None
    policy: dict[str, Any] | None = None


class _Policy(_Section):
    policy_function: str | None = None
    policy_kwargs: dict[str, Any] = {}


class _ScalingKwargs(_Section):
    """Of our own policy. Bounds and delays are Serve's: min_replicas, upscale_delay_s and so on."""

    ttft_target: float = Field(ScalingOptions.ttft_target, gt=0)
    utilization: float = Field(ScalingOptions.utilization, gt=0, le=1)
    kv_utilization: float = Field(ScalingOptions.kv_utilization, gt=0, le=1)
    tolerance: float = Field(ScalingOptions.tolerance, ge=0, lt=1)


# Of Serve's autoscaling settings, those that our policy does not read.
_BY_REQUESTS = (
    "target_ongoing_requests",
    "metrics_interval_s",
    "look_back_period_s",
    "smoothing_factor",
    "upscale_smoothing_factor",
    "downscale_smoothing_factor",
    "upscaling_factor",
    "downscaling_factor",
    "aggregation_function",
)


class _DeploymentOptions(_Section):
    num_replicas: Any = None
    max_ongoing_requests: int | None = Field(None, ge=1)
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] | None = None
    max_replicas_per_node: int | None = Field(None, ge=1)
    max_constructor_retry_count: int | None = Field(None, ge=1)
    health_check_period_s: float | None = Field(None, gt=0)
    health_check_timeout_s: float | None = Field(None, gt=0)
    graceful_shutdown_wait_loop_s: float | None = Field(None, ge=0)
    graceful_shutdown_timeout_s: float | None = Field(None, ge=0)
    max_surge_percent: int | None = Field(None, ge=0, le=100)
    logging_config: dict[str, Any] | None = None
    request_router_config: dict[str, Any] | None = None
    refused = {
        "name": "deployments are named after what they are",
        "user_config": "PagedRay hands its own settings over that way: change the arguments, and deploy again",
        "max_queued_requests": "say scheduler.max_queued_requests",
        "placement_group_bundles": "say placement_group_config",
        "placement_group_strategy": "say placement_group_config",
    }

    @field_validator("num_replicas")
    @classmethod
    def _replicas(cls, value: Any) -> Any:
        if value is None or value == "auto" or (type(value) is int and value >= 1):
            return value
        raise ValueError('must be an integer of at least 1, or "auto"')


S = TypeVar("S", bound=_Section)


def _read(section: type[S], raw: Any, path: str) -> S:
    """Validate one section and say what is wrong in our own words."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{path or 'the arguments'} must be a mapping with {', '.join(section.model_fields)}")
    for key in raw:
        at = f"{path}.{key}" if path else str(key)
        if key in section.refused and raw[key] not in (None, {}):
            raise ConfigError(f"{at} is not supported: {section.refused[key]}")
        if key not in section.model_fields and key not in section.refused:
            raise ConfigError(f"{at} is not a setting{nearest(str(key), section.model_fields)}")
    # `key:` with nothing after it is None in YAML: as if it was left out
    given = {k: v for k, v in raw.items() if k in section.model_fields and v is not None}
    try:
        return section.model_validate(copy.deepcopy(given))
    except ValidationError as errors:
        raise ConfigError(_explain(errors.errors()[0], path)) from None


def _explain(error: Any, path: str) -> str:
    """One pydantic error as "path must be …, not value"."""
    for step in error["loc"]:
        if step == "[key]":
            return f"{path}: names must be strings, not {error['input']!r}"
        path += f"[{step}]" if isinstance(step, int) else f"{'.' if path else ''}{step}"
    if error["type"] == "missing":
        return f"{path} is missing"
    what = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    what = what.replace("String should have", "must have").replace("dictionary", "mapping")
    if "api_keys" in error["loc"]:
        return f"{path} {what}"  # a key is not for logs
    return f"{path} {what}, not {error['input']!r}"


def _options(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """The options of a Serve deployment that the user set, checked, as `Deployment.options` takes them."""
    options = _read(_DeploymentOptions, raw, path).model_dump(exclude_unset=True, exclude_none=True)
    router = options.pop("request_router_config", {}).get("request_router_class", "ray.")
    if not str(router).startswith("ray."):
        at = f"{path}.request_router_config.request_router_class"
        raise ConfigError(f"{at} is not supported: the global scheduler routes requests, not {router!r}")
    if "request_router_config" in raw:
        logger.info("%s.request_router_config changes nothing here: requests are routed by prefix and load", path)
    for key, inner in (("ray_actor_options", _ActorOptions), ("autoscaling_config", _Autoscaling)):
        if key in options:
            checked = _read(inner, options[key], f"{path}.{key}")
            options[key] = checked.model_dump(exclude_unset=True, exclude_none=True)
    scaling = options.get("autoscaling_config")
    if scaling is not None:
        if options.get("num_replicas", "auto") != "auto":
            raise ConfigError(f"{path} says num_replicas and autoscaling_config: keep one")
        low, high = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
        if low > high and options.get("num_replicas") != "auto":
            raise ConfigError(f"{path}.autoscaling_config.min_replicas ({low}) is over max_replicas ({high})")
    return options


def _model(section: _LLMConfig, path: str) -> ModelDeployment:
    loading = _read(_ModelLoading, section.model_loading_config, f"{path}.model_loading_config")
    source = loading.model_source or _demo_source(loading.model_id, path) or loading.model_id
    if section.llm_engine not in (None, "vLLM"):
        raise ConfigError(f"{path}.llm_engine must be left out (PagedRay runs its own), not {section.llm_engine!r}")
    _read(_Experimental, section.experimental_configs, f"{path}.experimental_configs")

    kwargs = dict(section.engine_kwargs)
    if "model" in kwargs:
        raise ConfigError(f"{path}.engine_kwargs.model is not a setting: say model_loading_config.model_source")
    token = kwargs.pop("hf_token", None)
    if not isinstance(token, str | None):
        raise ConfigError(f"{path}.engine_kwargs.hf_token must be a string")
    if loading.tokenizer_source is not None:
        if "tokenizer" in kwargs:
            raise ConfigError(f"{path}.engine_kwargs.tokenizer says model_loading_config.tokenizer_source again")
        kwargs["tokenizer"] = loading.tokenizer_source
    reading = {key: kwargs.pop(key, None) for key in READERS}  # vLLM has these among its engine's settings
    for key, value in reading.items():
        if value is not None and value not in READERS[key]:
            raise ConfigError(f"{path}.engine_kwargs.{key} must be {' or '.join(READERS[key])}, not {value!r}")
    deployment = _options(section.deployment_config, f"{path}.deployment_config")
    if kwargs.get("device", "auto") == "auto":
        kwargs["device"] = _device(section, deployment.get("ray_actor_options", {}), path)
    engine = EngineConfig.from_kwargs(f"{path}.engine_kwargs", **{**kwargs, "model": source})
    deployment |= _placement(section, deployment.pop("ray_actor_options", {}), engine, path)
    if token is not None:
        environment = deployment.get("ray_actor_options", {}).get("runtime_env", {})
        variables = {**environment.get("env_vars", {}), "HF_TOKEN": token}
        deployment["ray_actor_options"] = {"num_cpus": 0, "runtime_env": {**environment, "env_vars": variables}}
    role = _role(section.role, engine, path)
    scaling = _scaling(deployment, role, f"{path}.deployment_config.autoscaling_config")
    return ModelDeployment(loading.model_id, engine, deployment, **reading, role=role, where=path, scaling=scaling)


def _by_role(root: _Application) -> list[tuple[str, Any]]:
    """Serve LLM's two configs for prefill and decode, as sections of `llm_configs` with a role."""
    sections: list[tuple[str, Any]] = []
    for role, raw in (("prefill", root.prefill_config), ("decode", root.decode_config)):
        path = f"{role}_config"
        if raw is None:
            there = root.prefill_config is not None or root.decode_config is not None
            raise ConfigError(f"{path} is missing" if there else "llm_configs is missing")
        if isinstance(raw, str):
            raw = _load(Path(raw))
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must be a mapping like an entry of llm_configs, not {raw!r}")
        if raw.get("role", role) != role:
            raise ConfigError(f"{path}.role must be left out, not {raw['role']!r}")
        sections.append((path, {**raw, "role": role}))
    return sections


def _role(said: str | None, engine: EngineConfig, path: str) -> str:
    """What a group does: as `role` says, else as vLLM's kv_role does. Raises where it could not do it."""
    transfer = engine.kv_transfer_config
    role = said or _ROLES[transfer.kv_role]
    if said in ("prefill", "decode"):
        at, refuses = f"{path}.role is {role}", "kv_consumer" if role == "prefill" else "kv_producer"
        if not transfer.shares or not engine.enable_prefix_caching:
            raise ConfigError(f"{at}, which takes a kv_connector and enable_prefix_caching: blocks go by a store")
        if transfer.kv_role == refuses:
            right = "kv_both or " + ("kv_producer" if role == "prefill" else "kv_consumer")
            raise ConfigError(f"{at}: kv_transfer_config.kv_role must be {right}, not {refuses!r}")
    return role


def _check_same(model: ModelDeployment, path: str, other: ModelDeployment, where: str) -> None:
    """Raise unless two deployments may serve one model: they differ in their role, and can use each other's KV."""
    if model.role == other.role:
        at = f"{path}.model_loading_config.model_id"
        raise ConfigError(f"{at} is {model.model_id!r}, as in {where}: ids must differ, or roles (prefill, decode)")
    for name in (
        "model",
        "tokenizer",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "block_size",
        "max_model_len",
        "generation_config",
    ):
        mine, theirs = getattr(model.engine, name), getattr(other.engine, name)
        if mine != theirs:
            what = f"{name} is {mine!r}, and {theirs!r} in {where}"
            raise ConfigError(f"{path}: {what}: groups of one model must have the same")
    if (model.tool_call_parser, model.reasoning_parser) != (other.tool_call_parser, other.reasoning_parser):
        raise ConfigError(f"{path} and {where} say different parsers for one model")


def _scaling(deployment: dict[str, Any], role: str, path: str) -> ScalingOptions | None:
    """How our policy scales a model's groups; None where nobody does, or another policy."""
    config = deployment.get("autoscaling_config")
    auto = deployment.get("num_replicas") == "auto"
    if config is None and not auto:
        return None
    if role != "mixed":
        logger.warning("%s: groups that only %s keep to min_replicas; only mixed ones are scaled", path, role)
        return None
    config = config or {}
    policy = _read(_Policy, config.get("policy", {}), f"{path}.policy")
    if policy.policy_function not in (None, SCALING_POLICY):
        return None
    kwargs = _read(_ScalingKwargs, policy.policy_kwargs, f"{path}.policy.policy_kwargs")
    for key in _BY_REQUESTS:
        if key in config:
            logger.info("%s.%s changes nothing here: groups are scaled by prefill, KV and TTFT", path, key)
    down = config.get("downscale_delay_s", ScalingOptions.downscale_delay)
    return ScalingOptions(
        min_groups=config.get("min_replicas", 1),
        max_groups=config.get("max_replicas", _AUTO_REPLICAS if auto else 1),
        upscale_delay=config.get("upscale_delay_s", ScalingOptions.upscale_delay),
        downscale_delay=down,
        idle_delay=config.get("downscale_to_zero_delay_s", down),
        **kwargs.model_dump(),
    )


def _placement(section: _LLMConfig, actor: dict[str, Any], engine: EngineConfig, path: str) -> dict[str, Any]:
    """Where a group's ranks go. They hold the resources, a bundle each, not the replica that watches them."""
    size = engine.world_size
    bundles = _bundles(section.placement_group_config, size, f"{path}.placement_group_config")
    strategy = (section.placement_group_config or {}).get("strategy")
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    said = {names[k]: v for k, v in actor.items() if k in names} | actor.get("resources", {})
    kind = actor.get("accelerator_type", section.accelerator_type)
    if kind:
        said[f"accelerator_type:{kind}"] = 0.001  # Ray's way to ask for a node that has one
    if twice := sorted({key for bundle in bundles for key in bundle} & said.keys()):
        raise ConfigError(f"{path}.placement_group_config and ray_actor_options both say {twice[0]}: keep one")
    asks_for_gpus = any(bundle.get("GPU") for bundle in [said, *bundles])
    if engine.device == "cuda" and not asks_for_gpus:  # Ray hides GPUs from who asks for none
        said["GPU"] = 1
    elif asks_for_gpus and engine.device == "cpu":
        logger.warning("%s asks for GPUs, which nobody uses: engine_kwargs.device is cpu", path)
    elif kind and not asks_for_gpus:
        logger.warning("%s.accelerator_type finds nodes and takes no GPU there: engine_kwargs.device is cpu", path)
    if said and not bundles:
        bundles = [{} for _ in range(size)]
    options: dict[str, Any] = {}
    if bundles:
        options["placement_group_bundles"] = [{"CPU": 1} | bundle | said for bundle in bundles]
        if any(bundle["CPU"] <= 0 for bundle in options["placement_group_bundles"]):
            raise ConfigError(f"{path} gives a rank no CPU: it needs some share of one")
        if strategy:
            options["placement_group_strategy"] = strategy
    environment = actor.get("runtime_env", section.runtime_env)
    if environment is not None:
        options["ray_actor_options"] = {"num_cpus": 0, "runtime_env": environment}
    return options


def _device(section: _LLMConfig, actor: dict[str, Any], path: str) -> str:
    """Where a group computes by what is said of its resources, in any of Serve LLM's ways.

    Who asks for GPUs wants them used: a rank that finds none must say so, and not compute on a CPU instead. A type of
    accelerator is a GPU's, as in Serve LLM.
    """
    said = _read(_Accelerator, section.accelerator_config or {}, f"{path}.accelerator_config").kind
    if said == "cpu":
        return "cpu"
    group = _read(_PlacementGroup, section.placement_group_config or {}, f"{path}.placement_group_config")
    bundles = [group.bundle_per_worker or {}, *(group.bundles or [])]
    types = section.accelerator_type, actor.get("accelerator_type"), actor.get("num_gpus")
    return "cuda" if said or any(types) or any(bundle.get("GPU") for bundle in bundles) else "auto"


def _share_hub_token(models: Iterable[ModelDeployment], ingress: dict[str, Any]) -> None:
    """The ingress fetches a model's tokenizer, and needs the token that its worker groups have. Models have one between
    them, or the hub's own variables say it for all.
    """
    tokens: dict[str, str] = {}
    for model in models:
        variables = model.deployment.get("ray_actor_options", {}).get("runtime_env", {}).get("env_vars", {})
        tokens |= {name: variables[name] for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if name in variables}
    if not tokens:
        return
    actor = ingress.get("ray_actor_options", {"num_cpus": 0})
    environment = actor.get("runtime_env", {})
    variables = tokens | environment.get("env_vars", {})
    ingress["ray_actor_options"] = {**actor, "runtime_env": {**environment, "env_vars": variables}}


def _demo_source(model_id: str, path: str) -> str | None:
    """The demo model goes by its id alone, wherever its file lies on this machine."""
    from .demo_model import DEMO_MODEL_ID, find

    if model_id != DEMO_MODEL_ID:
        return None
    found = find()
    if found is None:
        raise ConfigError(
            f"{path}: the demo model is not on this machine; python -m pagedray.cluster.demo_model gets it"
        )
    return str(found)


def _bundles(raw: dict[str, Any] | None, size: int, path: str) -> list[dict[str, float]]:
    """A bundle for each of a group's `size` ranks; none where nothing is said."""
    if raw is None:
        return []
    group = _read(_PlacementGroup, raw, path)
    if (group.bundles is None) == (group.bundle_per_worker is None):
        raise ConfigError(f"{path} must have either bundle_per_worker or bundles")
    if group.bundle_per_worker is not None:
        return [dict(group.bundle_per_worker) for _ in range(size)]
    if len(group.bundles or ()) != size:
        given = len(group.bundles or ())
        raise ConfigError(f"{path}.bundles must hold {size}, one a rank of the worker group, not {given}")
    return [dict(bundle) for bundle in group.bundles or ()]


# Files.


class ConfigFile(NamedTuple):
    """A YAML file: the application's arguments, and where to listen if it is a Serve config that says so."""

    args: dict[str, Any]
    http_options: dict[str, Any]


def read_config(path: str | Path) -> dict[str, Any]:
    """The application's arguments in a YAML file, which may be a Ray Serve config with one application."""
    return read_config_file(path).args


def read_config_file(path: str | Path) -> ConfigFile:
    """Read a YAML of the application's arguments, or a Ray Serve config (`applications: [{import_path, args}]`).

    `ConfigError` names the file and what is wrong with it; the arguments themselves are checked by `parse`.
    """
    path = Path(path)
    content = _load(path)
    if "applications" not in content:
        return ConfigFile(content, {})
    applications = content["applications"]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: applications must hold one application; for more, use `serve deploy {path}`")
    application, http = applications[0], content.get("http_options") or {}
    for where, given, known in (
        ("", content, ("applications", "http_options", "proxy_location")),
        ("applications[0].", application, ("name", "route_prefix", "import_path", "args")),
    ):
        for key in given:
            if key not in known:
                raise ConfigError(f"{path}: {where}{key} is not known here; use `serve deploy {path}`")
    if application.get("import_path") not in _IMPORT_PATHS:
        raise ConfigError(
            f"{path}: applications[0].import_path must be {IMPORT_PATH}, not {application.get('import_path')!r}"
        )
    if application.get("route_prefix", "/") != "/":
        raise ConfigError(f'{path}: applications[0].route_prefix must be "/"; for another, use `serve deploy {path}`')
    args = application.get("args")
    if not isinstance(args, dict):
        raise ConfigError(f"{path}: applications[0].args must be a mapping with llm_configs")
    listen = _read(_Http, http, f"{path}: http_options").model_dump(exclude_unset=True)
    return ConfigFile(args, listen)


def _load(path: Path, key: str = "llm_configs") -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except _DuplicateKey as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping with {key}")
    return content


class _DuplicateKey(Exception):
    pass


class _Loader(yaml.SafeLoader):
    """YAML says that a mapping's keys differ; PyYAML would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                raise _DuplicateKey(f"{key.value} stands twice, in lines {seen[key.value]} and {line}")
            if isinstance(key, yaml.ScalarNode):
                seen[key.value] = line
        return super().construct_mapping(node, deep)

"""The ingress: the HTTP application that Serve hosts, in as many replicas as the load needs."""

import asyncio
import base64
import logging
import pickle
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from ..scheduler.block_pool import hash_prompt, root_hash
from ..scheduler.errors import EngineDead, PagedRayError
from ..scheduler.request import Request, SequenceOutput
from ..scheduler.tenants import TenantDirectory
from ..workers.checkpoint.locate import read_config, sampling_defaults
from . import global_scheduler
from .config import ApplicationConfig, ModelDeployment
from .console.routes import add_console
from .global_scheduler import ClusterStats
from .group_routes import add_group_routes
from .http_server import HttpServer, ListenAddress
from .json_log import log_as_json
from .metrics import exposition
from .metrics.http import HttpWatch, add_metric_routes
from .metrics.reports import IngressReport
from .metrics.requests import RequestMetrics
from .openai.batch_runner import BatchRunner
from .openai.batch_store import BatchStore
from .openai.engine_client import EngineClient, ServedModel
from .openai.file_store import FileStore
from .openai.router import MAX_BODY_BYTES, build_app
from .openai.tenancy import caller
from .resume import ResumingEngine
from .sharded_client import ShardedClient
from .text.tokenizer import Tokenizer
from .text.tool_calls import detect_parser
from .tracing import make_tracing

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 2.0
_RELOAD_SECONDS = 60.0  # until a model that could not be read, perhaps because the hub was away, is tried again
_PROBE_SECONDS = 3.0  # /health and /metrics answer in about this time, whatever has died


class MeasuredEngine:
    """An `EngineClient` that stamps requests with whose they are, and counts and times what passes through another."""

    def __init__(self, engine: EngineClient, metrics: RequestMetrics, block_size: Callable[[str], int] = lambda _: 0):
        """`block_size` gives the tokens in a KV block of a model's groups; 0: not known yet."""
        self.engine = engine
        self.metrics = metrics
        self.block_size = block_size

    def _stamp(self, request: Request) -> Request:
        """Identity comes from the key alone. A salt that the caller asks for narrows the tenant's, never widens it."""
        tenant = caller()
        salt, size = tenant.salt(request.cache_salt), self.block_size(request.model)
        hashes: tuple[bytes, ...] = ()
        if size and not request.reads_prompt:
            hashes = hash_prompt(request.prompt_token_ids, size, root_hash(request.model, salt))
        return replace(request, tenant=tenant.name, cache_salt=salt, block_hashes=hashes)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        watch = self.metrics.watch(self._stamp(request))
        outputs = self.engine.generate(watch.request)
        try:
            async for output in outputs:
                watch.output(output)
                yield output
        except PagedRayError as error:
            watch.failed(error)
            raise
        finally:
            await outputs.aclose()
            watch.end()


def _reading(model: ModelDeployment) -> tuple[Any, ...]:
    """What an ingress makes of a model: if that is as it was, there is nothing to load."""
    engine = model.engine
    reading = (model.tool_call_parser, model.reasoning_parser, engine.generation_config)
    return model.model_id, engine.model, engine.tokenizer, engine.max_model_len, *reading


def to_user_config(config: ApplicationConfig) -> dict[str, str]:
    """What Serve hands `Ingress.reconfigure` of it: a Serve `user_config` must be JSON."""
    return {"config": base64.b64encode(pickle.dumps(config)).decode()}


@serve.deployment
@serve.ingress()
class Ingress:
    async def __init__(  # type: ignore[misc]  # as Serve wants it
        self, config: ApplicationConfig, listen: ListenAddress | None, *groups: Any
    ) -> None:
        """`listen`: where to serve HTTP; None: requests come by Serve's proxy.

        `groups`: handles of the models' deployments; naming them here makes Serve deploy them.
        """
        self.config = config
        if config.files is not None:
            await asyncio.to_thread(FileStore(config.files).prepare)
        self.ingress_id = uuid.uuid4().hex[:8]
        if config.observability.json_logs:
            log_as_json(f"ingress {self.ingress_id}")
        self.tracing = make_tracing("ingress", config.observability)
        self.metrics = RequestMetrics(self.tracing)
        self.node_id = ray.get_runtime_context().get_node_id()
        self.tenants = TenantDirectory(config.tenants)
        application = serve.get_replica_context().app_name
        schedulers = global_scheduler.connect_all(application, config.scheduler.scheduler_shards)
        self.client = ShardedClient(schedulers, self.tenants, application, self.ingress_id)
        self.cluster = ClusterStats({}, ())
        self.block_sizes: dict[str, int] = {}  # by model, as their groups have it
        self.models: dict[str, ServedModel] = {}
        self.unreadable: dict[str, str] = {}  # models whose tokenizer or config cannot be read, and why
        self.models = await self._load_all(config.models)
        self.arriving: set[str] = set()  # models that came while this ran, and have not been up yet
        self.resuming = ResumingEngine(
            self.client,
            config.scheduler.migration_limit,
            lambda request: self.metrics.add("request_resumed", request.model),
            lambda request: self.metrics.add("request_moved", request.model),
            self._block_size,
        )
        self.engine = MeasuredEngine(self.resuming, self.metrics, self._block_size)
        self.batches = self._make_batches()
        self._known_nodes: list[dict[str, Any]] = []
        self._asking: asyncio.Task | None = None  # Ray for its nodes
        self._refresher = asyncio.create_task(self._refresh_for_ever())
        self.http = HttpServer(self.__serve_build_asgi_app__(), listen) if listen else None

    async def reconfigure(self, user_config: dict[str, str]) -> None:
        """Take in a changed document: Serve calls it when this has started, and while it runs.

        Models, limits, tenants and keys change for requests that come from now on; those in flight go on as they began.
        """
        config: ApplicationConfig = pickle.loads(base64.b64decode(user_config["config"]))
        if config == self.config:
            return
        before = {_reading(m) for m in self.config.models}
        loaded = await self._load_all(
            [m for m in config.models if _reading(m) not in before or m.model_id not in self.models]
        )
        self.arriving |= loaded.keys() - self.models.keys()
        models = self.models | loaded
        self.models = {m.model_id: models[m.model_id] for m in config.models if m.model_id in models}
        self.unreadable = {m.model_id: why for m in config.models if (why := self.unreadable.get(m.model_id))}
        self.arriving &= self.models.keys()
        self.tenants.replace(config.tenants)
        self.resuming.migration_limit = config.scheduler.migration_limit
        self.config = config
        try:
            await self.client.configure(config.scheduler, config.tenants, config.observability)
        except PagedRayError as error:  # it is told again every two seconds; raising here would end the ingress
            logger.warning("the global scheduler does not know of the changed limits yet: %s", error)

    async def _load_all(self, models: Sequence[ModelDeployment]) -> dict[str, ServedModel]:
        """Those whose tokenizers can be loaded. One that cannot must not take the others with it."""
        self._loaded_at = time.monotonic()
        loaded: dict[str, ServedModel] = {}
        errors: list[Exception] = []
        for model in {m.model_id: m for m in models}.values():  # groups of different roles serve one
            try:
                loaded[model.model_id] = await asyncio.to_thread(self._load, model)
                self.unreadable.pop(model.model_id, None)
            except Exception as error:
                logger.exception("%s is not served: its tokenizer cannot be loaded", model.model_id)
                self.unreadable[model.model_id] = str(error)
                errors.append(error)
        if errors and not loaded and not self.models:
            raise errors[0]
        return loaded

    @staticmethod
    def _load(model: ModelDeployment) -> ServedModel:
        source = model.engine.model
        tokenizer = Tokenizer.load(source, model.engine.tokenizer)
        return ServedModel(
            id=model.model_id,
            tokenizer=tokenizer,
            # The group may hold less; it tells when it has come up.
            max_model_len=model.engine.max_model_len or model.engine.context_length(read_config(source)),
            created=int(time.time()),
            tool_call_parser=model.tool_call_parser or detect_parser(tokenizer.chat_template),
            reasoning_parser=model.reasoning_parser,
            sampling_defaults=sampling_defaults(model.engine),
        )

    def _make_batches(self) -> BatchRunner | None:
        if self.config.files is None:
            return None
        store = BatchStore(FileStore(self.config.files))
        return BatchRunner(store, self.engine, self._models, self.tenants.find, MAX_BODY_BYTES)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_app(
            models=self._models,
            engine=self.engine,
            health=self._health,
            metrics=self._render_metrics,
            tenants=self.tenants,
            limits=lambda tenant: self.client.rate_limits.get(tenant.name),
            batches=self.batches,
        )
        add_group_routes(app, self.client, lambda: not self.config.tenants or caller().operator)
        add_metric_routes(app, self._whole_cluster)
        add_console(
            app,
            self._whole_cluster,
            self._nodes,
            models=lambda: {name: m.max_model_len for name, m in self._models().items()},
            may_sleep=self._may_sleep,
            caller=caller,
            sees_all=lambda tenant: tenant.operator or not self.config.tenants,
        )
        app.add_middleware(HttpWatch, metrics=self.metrics, tracing=self.tracing)  # the outermost
        return app

    def _block_size(self, model: str) -> int:
        """Tokens in a KV block of the model's groups; 0: not known yet."""
        return self.block_sizes.get(model, 0)

    def _models(self) -> dict[str, ServedModel]:
        """Those that the caller may use: to it, there are no others."""
        allowed = caller().models
        return {name: m for name, m in self.models.items() if name in allowed} if allowed else self.models

    def _may_sleep(self) -> set[str]:
        return {m.model_id for m in self.config.models if m.may_sleep}

    def check_health(self) -> None:
        if self.http is not None:
            self.http.check()

    async def __del__(self) -> None:
        if self.batches is not None:
            await self.batches.close()
        if self.http is not None:
            await self.http.close()

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self.client.configure(self.config.scheduler, self.config.tenants, self.config.observability)
                self._take(await self.client.stats(self._report()))
                if self.unreadable and time.monotonic() - self._loaded_at > _RELOAD_SECONDS:
                    config = self.config
                    loaded = await self._load_all([m for m in config.models if m.model_id not in self.models])
                    if config is self.config:  # else a changed document has come meanwhile, and loaded what it wants
                        self.models |= loaded
            except Exception:
                logger.exception("the state of the cluster could not be read")
            await asyncio.sleep(_REFRESH_SECONDS)

    def _take(self, cluster: ClusterStats) -> None:
        self.cluster = cluster
        self.arriving -= {group.model for group in cluster.groups}
        shortest: dict[str, int] = {}  # any of a model's groups may get a request
        for group in cluster.groups:
            self.block_sizes[group.model] = group.block_size
            shortest[group.model] = min(group.max_model_len, shortest.get(group.model, group.max_model_len))
        for name, length in shortest.items():
            model = self.models.get(name)
            if model is not None and model.max_model_len != length:
                self.models[name] = replace(model, max_model_len=length)

    async def _health(self) -> dict[str, Any]:
        """Raise where a model has no group that could answer now, or that comes when it is asked for.

        One that was added later may still be loading. One that cannot start is told of; only where there is no other it
        is as if nothing was there.
        """
        try:
            self._take(await asyncio.wait_for(self.client.stats(), _PROBE_SECONDS))
        except TimeoutError:
            raise EngineDead(f"the global scheduler has not answered within {_PROBE_SECONDS:g} s") from None
        if self.cluster.leaving:
            raise EngineDead("the server is shutting down")
        unreadable = {model: why for model, why in self.unreadable.items() if model not in self.models}
        failures = unreadable | {model: why for model, why in self.cluster.failures if model in self.models}
        up = {group.model for group in self.cluster.groups if not group.draining}
        missing = self.models.keys() - up - self.arriving - failures.keys() - self._may_sleep()
        if missing:
            raise EngineDead(f"no worker group of {', '.join(sorted(missing))} is up")
        if len(failures) == len(self.config.models):
            raise EngineDead(f"nothing can start: {'; '.join(f'{m}: {why}' for m, why in failures.items())}")
        return {"failed": failures} if failures else {}

    def _report(self) -> IngressReport:
        """What this ingress has counted so far."""
        return IngressReport(self.ingress_id, self.node_id, self.metrics.counts())

    async def _whole_cluster(self) -> ClusterStats:
        """What every process has counted. Ours is told first, so that nobody is shown less later on, wherever it asks.

        Where the global scheduler does not answer: the others as they were, without the other ingresses.
        """
        report = self._report()
        try:
            cluster = await asyncio.wait_for(self.client.stats(report, with_ingresses=True), _PROBE_SECONDS)
        except (PagedRayError, TimeoutError):
            logger.warning("the global scheduler does not answer; groups are shown as they were")
            return replace(self.cluster, ingresses=(report,))
        self._take(cluster)
        return cluster

    async def _nodes(self) -> list[dict[str, Any]]:
        """Ray's, as they were when it last answered. One thread asks, however many wait for it."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_for_nodes())
        await asyncio.wait([self._asking], timeout=_PROBE_SECONDS)
        return self._known_nodes

    async def _ask_for_nodes(self) -> None:
        try:
            self._known_nodes = await asyncio.to_thread(ray.nodes)
        except Exception as error:
            logger.warning("Ray does not tell its nodes: %r", error)

    async def _render_metrics(self) -> bytes:
        return exposition.render(await self._whole_cluster(), self.config.observability.vllm_metric_names)

"""The ingress: the HTTP application that Serve hosts, in as many replicas as the load needs."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve

from ..scheduler.errors import EngineDead, PagedRayError
from ..scheduler.request import Request, SequenceOutput
from ..workers.checkpoint.locate import read_config
from . import global_scheduler
from .cluster_client import ClusterClient
from .config import ApplicationConfig, ModelDeployment
from .global_scheduler import ClusterStats
from .http_server import HttpServer, ListenAddress
from .metrics import RequestMetrics
from .openai.router import ServedModel, build_app
from .text.tokenizer import Tokenizer
from .text.tool_calls import detect_parser

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 2.0
_PROBE_SECONDS = 3.0  # /health and /metrics answer in about this time, whatever has died


class MeasuredEngine:
    """An `EngineClient` that counts and times what passes through another."""

    def __init__(self, engine: ClusterClient, metrics: RequestMetrics):
        self.engine = engine
        self.metrics = metrics

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        metrics, model = self.metrics, request.model
        began = last = time.monotonic()
        first = True
        metrics.prompt_tokens.labels(model).inc(len(request.prompt_token_ids))
        generated, inter_token = metrics.generation_tokens.labels(model), metrics.inter_token.labels(model)
        outputs = self.engine.generate(request)
        reason = "abort"
        with metrics.in_flight.labels(model).track_inprogress():
            try:
                async for output in outputs:
                    now = time.monotonic()
                    if first:
                        metrics.ttft.labels(model).observe(now - began)
                        first = False
                    else:
                        inter_token.observe(now - last)
                    last = now
                    generated.inc(len(output.token_ids))
                    if output.finish_reason:
                        reason = output.finish_reason
                        metrics.e2e.labels(model).observe(now - began)
                    yield output
            except PagedRayError as error:
                reason = ""
                metrics.failed.labels(model, error.code or error.type).inc()
                raise
            finally:
                await outputs.aclose()
                if reason:
                    metrics.success.labels(model, reason).inc()


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
        self.client = ClusterClient(global_scheduler.connect(serve.get_replica_context().app_name))
        self.metrics = RequestMetrics()
        self.cluster = ClusterStats({}, ())
        self.models = {m.model_id: await asyncio.to_thread(self._load, m) for m in config.models}
        self._refresher = asyncio.create_task(self._refresh_for_ever())
        self.http = HttpServer(self.__serve_build_asgi_app__(), listen) if listen else None

    @staticmethod
    def _load(model: ModelDeployment) -> ServedModel:
        source = model.engine.model
        tokenizer = Tokenizer.load(source, model.engine.tokenizer)
        return ServedModel(
            id=model.model_id,
            tokenizer=tokenizer,
            # The group may hold less; it tells when it has come up.
            max_model_len=model.engine.max_model_len or read_config(source).max_position_embeddings,
            created=int(time.time()),
            tool_call_parser=model.tool_call_parser or detect_parser(tokenizer.chat_template),
            reasoning_parser=model.reasoning_parser,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(
            models=lambda: self.models,
            engine=MeasuredEngine(self.client, self.metrics),
            health=self._health,
            metrics=self._render_metrics,
        )

    def check_health(self) -> None:
        if self.http is not None:
            self.http.check()

    async def __del__(self) -> None:
        if self.http is not None:
            await self.http.close()

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self.client.configure(self.config.scheduler)
                self._take(await self.client.stats())
            except Exception:
                logger.exception("the state of the cluster could not be read")
            await asyncio.sleep(_REFRESH_SECONDS)

    def _take(self, cluster: ClusterStats) -> None:
        self.cluster = cluster
        for group in cluster.groups:
            model = self.models.get(group.model)
            if model is not None and model.max_model_len != group.max_model_len:
                self.models[group.model] = replace(model, max_model_len=group.max_model_len)

    async def _health(self) -> None:
        """Raise where a model has no group that could answer now."""
        try:
            self._take(await asyncio.wait_for(self.client.stats(), _PROBE_SECONDS))
        except TimeoutError:
            raise EngineDead(f"the global scheduler has not answered within {_PROBE_SECONDS:g} s") from None
        missing = self.models.keys() - {g.model for g in self.cluster.groups}
        if missing:
            raise EngineDead(f"no worker group of {', '.join(sorted(missing))} is up")

    async def _render_metrics(self) -> bytes:
        try:
            self._take(await asyncio.wait_for(self.client.stats(), _PROBE_SECONDS))
        except (PagedRayError, TimeoutError):
            logger.warning("the global scheduler does not answer; /metrics shows the groups as they were")
        return self.metrics.render(self.cluster)

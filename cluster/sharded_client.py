"""The ingress's side of several global schedulers: each tenant's requests for a model always go to the same one.

Groups and stores report to all of them, so each knows how loaded a group is and what it holds, whoever sent it there.
Tenants compete for the order in which their own scheduler hands out requests; between those of different schedulers
there is only the order in which a group runs what it has.
"""

import asyncio
from collections import ChainMap, Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

from ray.actor import ActorHandle

from ..scheduler.request import Request, SequenceOutput
from ..scheduler.shards import shard_of
from ..scheduler.tenants import RateLimits, Tenant, TenantDirectory
from .cluster_client import ClusterClient
from .config import ObservabilityOptions, SchedulerOptions
from .global_scheduler import ClusterStats
from .metrics.reports import IngressReport


class ShardedClient:
    """Implements `openai.engine_client.EngineClient` over the `ClusterClient` of each global scheduler."""

    def __init__(
        self, schedulers: Sequence[ActorHandle], directory: TenantDirectory, application: str = "", name: str = ""
    ):
        """`name` is the ingress's, as logs have it; a client's follows from it, since groups know clients apart."""
        self.clients = [
            ClusterClient(s, application, shard, f"{name}.{shard}" if name and shard else name)
            for shard, s in enumerate(schedulers)
        ]
        self.directory = directory
        # A tenant that has limits is known to one of them.
        self.rate_limits: Mapping[str, RateLimits] = ChainMap(*[c.rate_limits for c in self.clients])

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        tenant = self.directory.get(request.tenant)
        outputs = self.clients[shard_of(tenant, request.model, len(self.clients))].generate(request)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def configure(
        self,
        options: SchedulerOptions,
        tenants: tuple[Tenant, ...] = (),
        observability: ObservabilityOptions | None = None,
    ) -> None:
        await asyncio.gather(*[c.configure(options, tenants, observability) for c in self.clients])

    async def stats(self, ingress: IngressReport | None = None, with_ingresses: bool = False) -> ClusterStats:
        """Of what ingresses count the first scheduler keeps the books."""
        first, *others = self.clients
        return merged(await asyncio.gather(first.stats(ingress, with_ingresses), *[c.stats() for c in others]))

    async def drain_group(self, group_id: str, seconds: float) -> bool:
        """Have a group move what it has and end. False: there is no such group."""
        first, *others = self.clients
        if others and not await first.drain_group(group_id, None):
            return False  # before others send it nothing any more
        await asyncio.gather(*[c.drain_group(group_id, None) for c in others])
        return await first.drain_group(group_id, seconds)


def merged(stats: Sequence[ClusterStats]) -> ClusterStats:
    """Groups, stores and their fetches are known to every scheduler alike; what waits adds up.

    What all schedulers know alike, only the first one counts in `schedulers`, so that their sum is a total.
    """
    queued: Counter[str] = Counter()
    for s in stats:
        queued.update(s.num_queued)
    most = max(stats, key=lambda s: len(s.groups))  # one that has just restarted may not know all yet
    first, *others = (part for s in stats for part in s.schedulers)
    parts = (first, *(replace(part, groups_lost=()) for part in others))
    return replace(most, num_queued=dict(queued), schedulers=parts, ingresses=stats[0].ingresses)

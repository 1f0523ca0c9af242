"""What the ingress writes on a request: whose it is, its salt, and its blocks."""

import asyncio

import ray

from pagedray.cluster.ingress import Ingress, MeasuredEngine
from pagedray.cluster.metrics.requests import RequestMetrics
from pagedray.cluster.openai.tenancy import current_tenant
from pagedray.scheduler.request import Request, SamplingParams, SequenceOutput
from pagedray.scheduler.sequence import Sequence
from pagedray.scheduler.tenants import Tenant, hash_key


class Recorder:
    def __init__(self):
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        yield SequenceOutput(request.request_id, (1,), finish_reason="length")


def stamped(caller, **fields):
    recorder = Recorder()
    engine = MeasuredEngine(recorder, RequestMetrics(), lambda model: 4)

    async def main():
        current_tenant.set(caller)
        request = Request("r", tuple(range(10)), SamplingParams(seed=0), "m", **fields)
        assert [o async for o in engine.generate(request)]

    asyncio.run(main())
    return recorder.requests[0]


def test_the_hashes_are_those_of_the_group():
    request = stamped(Tenant("open"))
    sequence = Sequence(request, 0, (0.0, 0), 20)
    sequence.extend_hashes(4)
    assert request.block_hashes == tuple(sequence.block_hashes) and len(request.block_hashes) == 2


def test_identity_comes_from_the_key_and_a_salt_only_narrows():
    a, b = Tenant("a", (hash_key("a"),)), Tenant("b", (hash_key("b"),))
    claimed = stamped(a, tenant="b", cache_salt=b.cache_salt)
    assert claimed.tenant == "a"
    hashes = {r.block_hashes for r in (claimed, stamped(a), stamped(b), stamped(a, cache_salt="x"))}
    assert len(hashes) == 4


def test_tenants_share_prefixes_only_where_the_operator_says_so():
    a, b = (Tenant(name, (hash_key(name),), shared_prefix=True) for name in "ab")
    apart = Tenant("c", (hash_key("c"),))
    assert stamped(a).block_hashes == stamped(b).block_hashes != stamped(apart).block_hashes
    assert stamped(a, cache_salt="x").block_hashes != stamped(a).block_hashes


def test_the_ingress_can_be_sent_to_its_process():
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(Ingress)) is not None

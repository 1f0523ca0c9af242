"""What a node's KV store takes, without Ray: the ranks that hand out blocks are in this process."""

import asyncio
import time
from types import SimpleNamespace

from pagedray.cluster import global_scheduler
from pagedray.cluster.kv_store import PACK_SECONDS, KVOffer, KVStore
from pagedray.scheduler.prefix_index import pack


class Rank:
    """As an actor handle: hands out its part of a run as a header and an object."""

    def __init__(self):
        self.packed = []
        self.pack_kv = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._pack))

    def _pack(self, block_ids):
        async def header():
            self.packed.append(tuple(block_ids))
            return SimpleNamespace(num_bytes=100)

        return header(), "an object"


def test_blocks_are_not_read_when_their_group_may_use_them_for_something_else(monkeypatch):
    """The call waits in a store that was stopped, until whoever made it has given it up."""
    monkeypatch.setattr(global_scheduler, "connect_all", lambda application, num_shards: [])
    monkeypatch.setattr(KVStore, "_report_for_ever", lambda self: asyncio.sleep(0))

    def offer(name, seconds_left):
        return KVOffer(None, pack([name * 16]), (7,), 100, 1.0, time.monotonic() + seconds_left)

    async def test():
        store, rank = KVStore("app", "node"), Rank()
        await store.join("g", 1000, 60.0, SimpleNamespace(), [rank])
        assert await store.publish("g", offer(b"a", PACK_SECONDS - 1)) == "failed"  # to pack them may take longer
        assert await store.publish("g", offer(b"b", -30)) == "failed"
        assert rank.packed == [] and len(store.runs) == 0
        assert await store.publish("g", offer(b"b", PACK_SECONDS + 1)) == "stored"
        assert rank.packed == [(7,)] and len(store.runs) == 1

    asyncio.run(asyncio.wait_for(test(), 20))

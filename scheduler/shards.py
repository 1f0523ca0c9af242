"""Which of several global schedulers a request goes to, where one cannot carry all of them."""

from hashlib import blake2b

from .tenants import Tenant


def shard_of(tenant: Tenant, model: str, num_shards: int) -> int:
    """The same for all of a tenant's requests for a model, and for all its requests where it has limits: only a
    scheduler that sees all of them can count them.

    Rendezvous hashing (Thaler and Ravishankar, 1998): with one shard more, only what goes to the new one moves.
    """
    if num_shards == 1:
        return 0
    name = tenant.name if tenant.is_limited else f"{tenant.name}\0{model}"

    def weight(shard: int) -> bytes:
        return blake2b(f"{shard}\0{name}".encode(), digest_size=8).digest()

    return max(range(num_shards), key=weight)

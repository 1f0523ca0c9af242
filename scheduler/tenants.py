"""Tenants: who calls, by API key alone; what a tenant may have; and the books that hold it to that."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import ConfigError, InvalidApiKey, ModelNotFound, RateLimited

DEFAULT_TENANT = "default"
PRIORITY_CLASSES = {"interactive": -20, "standard": 0, "batch": 20}  # where a class's priorities lie; lower goes first
MAX_PRIORITY_IN_CLASS = 9  # a request moves within its class only: classes never overlap
_MINUTE = 60.0
_LIMITS = "max_concurrent_requests", "requests_per_minute", "tokens_per_minute", "max_queued_requests"


def hash_key(api_key: str) -> str:
    """What is kept of a key: SHA-256, in hex. Keys are long and random, so nothing slower is needed."""
    return hashlib.sha256(api_key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as the config declares it. A limit of None is no limit; no `models` means all of them.

    `cache_salt` is secret: it keeps the tenant's cached prefixes from everybody else, who could tell by a request's
    speed what others have asked. Where the config says none, it is derived from the first key; with `shared_prefix`
    there is none.
    """

    name: str
    key_hashes: tuple[str, ...] = ()
    weight: float = 1.0  # share of the service while tenants compete
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of what is admitted: as it may take, and once it has ended as it took
    max_queued_requests: int | None = None
    models: tuple[str, ...] = ()
    priority_class: str = "standard"
    cache_salt: str = ""
    shared_prefix: bool = False  # one cache with all other tenants that have it
    operator: bool = False  # may drain worker groups, and sees what all tenants do

    def __post_init__(self) -> None:
        where = f"tenant {self.name!r}"
        if not self.name:
            raise ConfigError("a tenant must have a name")
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"{where}: weight must be a number over 0, not {self.weight!r}")
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{where}: {name} must be at least 1, not {value!r}")
        if self.priority_class not in PRIORITY_CLASSES:
            known = ", ".join(PRIORITY_CLASSES)
            raise ConfigError(f"{where}: priority_class must be one of {known}, not {self.priority_class!r}")
        for key_hash in self.key_hashes:
            if len(key_hash) != 64 or not set(key_hash) <= set("0123456789abcdef"):
                raise ConfigError(f"{where}: a key hash must be 64 hex digits of SHA-256")
        if self.shared_prefix and self.cache_salt:
            raise ConfigError(f"{where}: cache_salt keeps prefixes apart and shared_prefix shares them: keep one")
        if self.key_hashes and not self.cache_salt and not self.shared_prefix:
            salt = hashlib.sha256(b"pagedray cache salt" + self.key_hashes[0].encode()).hexdigest()
            object.__setattr__(self, "cache_salt", salt)

    @property
    def is_limited(self) -> bool:
        """There is something to count: all its requests must go by one scheduler."""
        return any(getattr(self, name) is not None for name in _LIMITS)

    def priority(self, asked: int, background: bool = False) -> int:
        """A request's priority, moved into the tenant's class; into the class of batches where it is of one."""
        base = PRIORITY_CLASSES["batch" if background else self.priority_class]
        return base + max(-MAX_PRIORITY_IN_CLASS, min(MAX_PRIORITY_IN_CLASS, asked))

    def salt(self, asked: str) -> str:
        """The salt of a request's prefixes. What it asks for narrows who shares them, and never widens it."""
        if not self.cache_salt or not asked:
            return self.cache_salt or asked
        return hmac.new(self.cache_salt.encode(), asked.encode(), hashlib.sha256).hexdigest()

    def check_model(self, model: str) -> None:
        """Raises `ModelNotFound` for a model that this tenant may not use: to it, the model does not exist."""
        if self.models and model not in self.models:
            raise ModelNotFound(f"The model {model!r} does not exist or you have no access to it.", "model")


class TenantDirectory:
    """All tenants. Without any, everybody is the tenant `default`, which has no key and no limits."""

    def __init__(self, tenants: Iterable[Tenant] = ()):
        self.replace(tenants)

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """Have these from now on, and no others. Raises `ConfigError` where two have a key in common."""
        by_name = {t.name: t for t in tenants}
        owners: dict[str, str] = {}
        for tenant in by_name.values():
            for key_hash in tenant.key_hashes:
                if key_hash in owners:
                    raise ConfigError(f"tenants {owners[key_hash]!r} and {tenant.name!r} have the same key")
                owners[key_hash] = tenant.name
        self._tenants = by_name
        self._owners = [(key_hash.encode(), by_name[name]) for key_hash, name in owners.items()]
        self._default = by_name.get(DEFAULT_TENANT, Tenant(DEFAULT_TENANT))

    @property
    def has_keys(self) -> bool:
        return bool(self._owners)

    def get(self, name: str) -> Tenant:
        """The tenant of that name; for one that is not declared, a tenant without limits."""
        return self._tenants.get(name) or (self._default if name == DEFAULT_TENANT else Tenant(name))

    def find(self, name: str) -> Tenant | None:
        """The tenant of that name that may call now; None where there is no such any more."""
        known = name in self._tenants or (name == DEFAULT_TENANT and not self._owners)
        return self.get(name) if known else None

    def authenticate(self, api_key: str | None) -> Tenant:
        """The tenant whose key this is. Raises `InvalidApiKey` where keys are configured and this is none of them.

        Every hash is compared, in constant time: how long it takes says nothing about the keys.
        """
        if not self._owners:
            return self._default
        given = hash_key(api_key or "").encode()
        found = None
        for key_hash, tenant in self._owners:
            if hmac.compare_digest(given, key_hash):
                found = tenant
        if found is None:
            raise InvalidApiKey("You must give a valid API key, as in Authorization: Bearer KEY.")
        return found


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What is left to a tenant now; for OpenAI's `x-ratelimit-*` headers. None: not limited. `reset`s in seconds."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests: float = 0.0
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens: float = 0.0


class _Window:
    """Amounts of the last minute, by request. In no 60 seconds, wherever they begin, does more than `limit` pass."""

    __slots__ = ("limit", "used", "_entries")

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._entries: dict[str, tuple[float, int]] = {}  # request id → when, how much; oldest first

    def forget(self, now: float) -> None:
        while self._entries and self._entries[first := next(iter(self._entries))][0] <= now - _MINUTE:
            self.used -= self._entries.pop(first)[1]

    def add(self, now: float, request_id: str, amount: int) -> None:
        _, before = self._entries.pop(request_id, (now, 0))  # an id that comes again
        self._entries[request_id] = now, before + amount
        self.used += amount

    def settle(self, request_id: str, amount: int) -> None:
        """It turned out to be so much, if it is in the books still."""
        if request_id in self._entries:
            at, before = self._entries[request_id]
            self._entries[request_id] = at, amount
            self.used += amount - before

    def seconds_until(self, now: float, amount: int) -> float:
        """How long until `amount`, which is not over the limit, fits; less where something is settled until then."""
        excess, wait = self.used + amount - self.limit, 0.0
        for at, entry in self._entries.values():
            if excess <= 0:
                break
            excess, wait = excess - entry, at + _MINUTE - now
        return wait

    def check_integrity(self) -> None:
        entries = list(self._entries.values())
        assert self.used == sum(amount for _, amount in entries) and entries == sorted(entries, key=lambda e: e[0])


@dataclass(slots=True)
class _Account:
    requests: _Window | None
    tokens: _Window | None
    num_concurrent: int = 0
    num_queued: int = 0


@dataclass(slots=True)
class Quotas:
    """What each tenant has used. Ask `admit` first; then tell of each request's way: dispatched, ended, settled."""

    directory: TenantDirectory
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            rpm, tpm = tenant.requests_per_minute, tenant.tokens_per_minute
            account = _Account(_Window(rpm) if rpm else None, _Window(tpm) if tpm else None)
            self._accounts[tenant.name] = account
        return account

    def admit(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> None:
        """Take one request that may take so many tokens into the books, or raise `RateLimited`.

        More than the limit on tokens counts as the limit: such a request waits until nothing else is in the books.
        A refused request leaves no trace: it does not count against the limits.
        """
        account = self._account(tenant)
        if account.tokens:
            num_tokens = min(num_tokens, account.tokens.limit)
        waits: list[tuple[float, str]] = []
        for window, amount, what in (
            (account.requests, 1, "requests per minute"),
            (account.tokens, num_tokens, "tokens per minute"),
        ):
            if window is not None:
                window.forget(now)
                if window.used + amount > window.limit:
                    message = f"Rate limit of {window.limit} {what} reached: {window.used} used, {amount} asked"
                    waits.append((window.seconds_until(now, amount), message))
        if waits:
            wait, message = max(waits)
            raise RateLimited(f"{message}; try again in {wait:.1f} s", wait)
        for limit, value, what in (
            (tenant.max_concurrent_requests, account.num_concurrent, "concurrent requests"),
            (tenant.max_queued_requests, account.num_queued, "queued requests"),
        ):
            if limit is not None and value >= limit:
                message = f"Limit of {limit} {what} reached; try again when one has ended"
                raise RateLimited(message, 1.0)
        if account.requests:
            account.requests.add(now, request_id, 1)
        self.readmit(tenant, request_id, num_tokens, now)

    def readmit(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> None:
        """A request whose group was lost, or hands it over, queues again, and may take so many tokens more: it was
        admitted, so no limit holds it up."""
        account = self._account(tenant)
        if account.tokens:
            account.tokens.forget(now)
            account.tokens.add(now, request_id, num_tokens)
        account.num_concurrent += 1
        account.num_queued += 1

    def restore(self, tenant: Tenant) -> None:
        """A request that is running already came back with its group: it is counted, whatever the limits."""
        self._account(tenant).num_concurrent += 1

    def dispatched(self, tenant: Tenant) -> None:
        self._account(tenant).num_queued -= 1

    def ended(self, tenant: Tenant, was_queued: bool) -> None:
        account = self._account(tenant)
        account.num_concurrent -= 1
        account.num_queued -= was_queued

    def settle(self, tenant: Tenant, request_id: str, num_tokens: int) -> None:
        """What a request took in the end. It may be told after `ended`; a minute after `admit` it changes nothing."""
        account = self._account(tenant)
        if account.tokens:
            account.tokens.settle(request_id, num_tokens)

    def replace(self, directory: TenantDirectory) -> None:
        """Another config: limits change, what is used stays."""
        self.directory = directory
        for name, account in self._accounts.items():
            tenant = directory.get(name)
            for kind, limit in (("requests", tenant.requests_per_minute), ("tokens", tenant.tokens_per_minute)):
                window = getattr(account, kind)
                if limit is None or window is None:
                    setattr(account, kind, _Window(limit) if limit else None)
                else:
                    window.limit = limit

    def limits(self, tenant: Tenant, now: float) -> RateLimits:
        account = self._account(tenant)
        figures: list[tuple[int | None, int | None, float]] = []
        for window in (account.requests, account.tokens):
            if window is None:
                figures.append((None, None, 0.0))
            else:
                window.forget(now)
                figures.append(
                    (window.limit, max(0, window.limit - window.used), window.seconds_until(now, window.limit))
                )
        return RateLimits(*figures[0], *figures[1])

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        for name, account in self._accounts.items():
            assert 0 <= account.num_queued <= account.num_concurrent, f"{name}: {account}"
            for window in (account.requests, account.tokens):
                if window is not None:
                    window.check_integrity()

    def counts(self, tenant: str) -> tuple[int, int]:
        """(queued, queued and running) requests of a tenant."""
        account = self._accounts.get(tenant)
        return (account.num_queued, account.num_concurrent) if account else (0, 0)

"""Who calls, and what it may have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.errors import ConfigError, InvalidApiKey, ModelNotFound, RateLimited
from pagedray.scheduler.tenants import Quotas, Tenant, TenantDirectory, hash_key


def test_the_key_alone_says_who_calls():
    a, b = Tenant("a", (hash_key("key-a"), hash_key("second"))), Tenant("b", (hash_key("key-b"),))
    directory = TenantDirectory([a, b])
    assert directory.authenticate("second") is a and directory.authenticate("key-b") is b
    for wrong in (None, "", "key-c", hash_key("key-a")):
        with pytest.raises(InvalidApiKey):
            directory.authenticate(wrong)


def test_without_keys_everybody_is_the_default_tenant():
    assert TenantDirectory().authenticate("anything").name == "default"
    limited = Tenant("default", requests_per_minute=5)
    assert TenantDirectory([limited]).authenticate(None) is limited


def test_keys_are_not_kept():
    assert "secret" not in repr(TenantDirectory([Tenant("a", (hash_key("secret"),))]).get("a"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "must have a name"),
        ({"weight": 0}, "weight must be a number over 0"),
        ({"weight": float("nan")}, "weight must be"),
        ({"tokens_per_minute": 0}, "tokens_per_minute must be at least 1"),
        ({"priority_class": "vip"}, "must be one of interactive, standard, batch"),
        ({"key_hashes": ("plain key",)}, "64 hex digits"),
        ({"cache_salt": "s", "shared_prefix": True}, "keep one"),
    ],
)
def test_a_wrong_tenant_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Tenant(**{"name": "t"} | fields)


def test_two_tenants_cannot_have_one_key():
    with pytest.raises(ConfigError, match="'a' and 'b' have the same key"):
        TenantDirectory([Tenant("a", (hash_key("k"),)), Tenant("b", (hash_key("k"),))])


def test_salts_keep_tenants_apart_and_requests_only_narrow():
    a, b = Tenant("a", (hash_key("ka"),)), Tenant("b", (hash_key("kb"),))
    salts = {t.salt(asked) for t in (a, b) for asked in ("", "x", a.cache_salt, b.cache_salt)}
    assert len(salts) == 8 and a.salt("") == a.cache_salt
    assert Tenant("open").salt("x") == "x" and Tenant("open").salt("") == ""


def test_models_and_priorities():
    tenant = Tenant("t", models=("m",), priority_class="batch")
    tenant.check_model("m")
    with pytest.raises(ModelNotFound):
        tenant.check_model("other")
    assert (tenant.priority(0), tenant.priority(-1000), tenant.priority(1000)) == (20, 11, 29)


def test_what_is_left_is_told():
    quotas, tenant = Quotas(TenantDirectory()), Tenant("t", requests_per_minute=2, tokens_per_minute=100)
    quotas.admit(tenant, 60, 10.0)
    with pytest.raises(RateLimited, match="100 tokens per minute") as refused:
        quotas.admit(tenant, 50, 20.0)
    assert refused.value.retry_after == 50.0
    limits = quotas.limits(tenant, 20.0)
    assert (limits.remaining_requests, limits.remaining_tokens, limits.reset_tokens) == (1, 40, 50.0)
    quotas.admit(tenant, 50, 70.0)


def test_another_config_keeps_what_is_used():
    quotas = Quotas(TenantDirectory())
    quotas.admit(Tenant("t", requests_per_minute=5), 1, 0.0)
    lower = Tenant("t", requests_per_minute=1)
    quotas.replace(TenantDirectory([lower]))
    with pytest.raises(RateLimited):
        quotas.admit(lower, 1, 1.0)


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(1, 60), st.booleans()), max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_minute_exceeds_the_limits(events):
    """Not even one that lies across two refills; and whoever waits as long as it is told is admitted."""
    tenant = Tenant("t", requests_per_minute=4, tokens_per_minute=100, max_concurrent_requests=6)
    quotas, now, running, admitted = Quotas(TenantDirectory([tenant])), 0.0, 0, []
    for gap, num_tokens, ends in events:
        now += gap
        if ends and running:
            quotas.dispatched(tenant)
            quotas.ended(tenant, was_queued=False)
            running -= 1
        try:
            quotas.admit(tenant, num_tokens, now)
        except RateLimited as error:
            if running < 6:
                now += error.retry_after + 1e-6
                quotas.admit(tenant, num_tokens, now)
            else:
                continue
        running += 1
        admitted.append((now, num_tokens))
        minute = [n for at, n in admitted if at > now - 60.0]
        assert len(minute) <= 4 and sum(minute) <= 100 and running <= 6
        quotas.check_integrity()

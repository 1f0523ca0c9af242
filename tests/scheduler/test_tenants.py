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
    quotas.admit(tenant, "a", 60, 10.0)
    with pytest.raises(RateLimited, match="100 tokens per minute") as refused:
        quotas.admit(tenant, "b", 50, 20.0)
    assert refused.value.retry_after == 50.0
    limits = quotas.limits(tenant, 20.0)
    assert (limits.remaining_requests, limits.remaining_tokens, limits.reset_tokens) == (1, 40, 50.0)
    quotas.admit(tenant, "b", 50, 70.0)


def test_what_was_not_used_is_given_back():
    quotas, tenant = Quotas(TenantDirectory()), Tenant("t", tokens_per_minute=100)
    quotas.admit(tenant, "a", 90, 0.0)
    quotas.dispatched(tenant)
    quotas.ended(tenant, was_queued=False)  # its group tells a little later
    quotas.settle(tenant, "a", 30)
    assert quotas.limits(tenant, 1.0).remaining_tokens == 70
    quotas.admit(tenant, "b", 70, 1.0)
    quotas.settle(tenant, "b", 200)  # more than was reckoned is held against the tenant
    with pytest.raises(RateLimited, match="230 used, 1 asked") as refused:
        quotas.admit(tenant, "c", 1, 2.0)
    assert refused.value.retry_after == 59.0  # until "b" is forgotten, "a" would not do
    quotas.limits(tenant, 61.0)
    quotas.settle(tenant, "a", 0)  # long forgotten
    assert quotas.limits(tenant, 61.0).remaining_tokens == 100
    quotas.check_integrity()


def test_what_asks_for_more_than_the_limit_comes_when_nothing_else_is_in_the_books():
    quotas, tenant = Quotas(TenantDirectory()), Tenant("t", tokens_per_minute=100)
    quotas.admit(tenant, "a", 10, 0.0)
    with pytest.raises(RateLimited, match="10 used, 100 asked") as refused:
        quotas.admit(tenant, "long", 8000, 30.0)
    assert refused.value.retry_after == 30.0
    quotas.admit(tenant, "long", 8000, 60.0)
    quotas.settle(tenant, "long", 40)
    quotas.admit(tenant, "b", 60, 60.0)


def test_another_config_keeps_what_is_used():
    quotas = Quotas(TenantDirectory())
    quotas.admit(Tenant("t", requests_per_minute=5), "a", 1, 0.0)
    lower = Tenant("t", requests_per_minute=1)
    quotas.replace(TenantDirectory([lower]))
    with pytest.raises(RateLimited):
        quotas.admit(lower, "b", 1, 1.0)


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(1, 120), st.sampled_from([None, 0.0, 0.3, 1.0])), max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_minute_exceeds_the_limits(events):
    """Not even one that lies across two refills; and whoever waits as long as it is told is admitted.

    What has ended counts with the share of its tokens that it took; what asks for more than 100 counts as 100.
    """
    tenant = Tenant("t", requests_per_minute=4, tokens_per_minute=100, max_concurrent_requests=6)
    quotas, now, running, admitted = Quotas(TenantDirectory([tenant])), 0.0, [], {}
    for number, (gap, num_tokens, ends) in enumerate(events):
        now += gap
        if ends is not None and running:
            ended = running.pop(0)
            quotas.dispatched(tenant)
            quotas.ended(tenant, was_queued=False)
            admitted[ended] = admitted[ended][0], int(ends * admitted[ended][1])
            quotas.settle(tenant, ended, admitted[ended][1])
        try:
            quotas.admit(tenant, str(number), num_tokens, now)
        except RateLimited as error:
            if len(running) < 6:
                now += error.retry_after + 1e-6
                quotas.admit(tenant, str(number), num_tokens, now)
            else:
                continue
        running.append(str(number))
        admitted[str(number)] = now, min(num_tokens, 100)
        minute = [n for at, n in admitted.values() if at > now - 60.0]
        assert len(minute) <= 4 and sum(minute) <= 100 and len(running) <= 6
        assert quotas.limits(tenant, now).remaining_tokens == 100 - sum(minute)
        quotas.check_integrity()

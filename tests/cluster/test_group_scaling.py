"""The policy in Serve's controller: what it asks, what it falls back on, and that it never gets in the way."""

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import ray
from ray.serve.config import AutoscalingConfig
from waiting import wait_until

from pagedray.cluster import autoscaling
from pagedray.cluster.app import application
from pagedray.cluster.config import ApplicationConfig
from pagedray.scheduler.autoscaling import Demand


class Scheduler:
    """The actor's handle: answers with `demand`, or raises it."""

    def __init__(self, demand):
        self.answer, self.asked = demand, []
        self.demand = SimpleNamespace(remote=self._ask)

    def _ask(self, model, fresh):
        self.asked.append((model, fresh))
        return self.answer


def context(target, app="app"):
    return SimpleNamespace(target_num_replicas=target, app_name=app)


@pytest.fixture
def scheduler(monkeypatch):
    scheduler = Scheduler(Demand(num_groups=1, kv_tokens=3000.0, kv_tokens_per_group=1000.0))

    def get(answer, timeout):
        assert timeout == 10.0, "calls are bounded"
        if isinstance(answer, Exception):
            raise answer
        return answer

    def find(application):
        if scheduler.answer is None:
            raise ValueError("no such actor")
        return scheduler

    monkeypatch.setattr(autoscaling.global_scheduler, "find", find)
    monkeypatch.setattr(autoscaling.ray, "get", get)
    monkeypatch.setattr(autoscaling, "_ASK_SECONDS", 0.01)
    return scheduler


def settled(policy, target, expected, seconds=10.0):
    deadline = time.monotonic() + seconds
    while target != expected:
        assert time.monotonic() < deadline, f"{target} groups, not {expected}"
        target, state = policy(context(target))
        assert state == {}
        time.sleep(0.01)
    return target


def test_it_follows_the_scheduler_and_ends_with_its_thread(scheduler):
    policy = autoscaling.GroupScaling("m", min_groups=0, max_groups=8, upscale_delay=0.0)
    settled(policy, 1, 4)
    wait_until(lambda: len(scheduler.asked) > 1)
    assert scheduler.asked[0] == ("m", True) and set(scheduler.asked[1:]) == {("m", False)}
    threads = [t for t in threading.enumerate() if t.name == "demand"]
    del policy
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("silence", [ray.exceptions.GetTimeoutError("late"), ray.exceptions.RayActorError(), None])
def test_while_the_scheduler_is_silent_the_last_decision_holds(scheduler, silence):
    policy = autoscaling.GroupScaling("m", min_groups=0, max_groups=8, upscale_delay=0.0)
    settled(policy, 1, 4)
    demand, scheduler.answer = scheduler.answer, silence
    while policy._feed.latest[0] != policy._seen:
        policy(context(4))
    for _ in range(20):
        assert policy(context(4)) == (4, {})
        time.sleep(0.005)
    scheduler.answer = Demand(num_groups=4, kv_tokens=5500.0, kv_tokens_per_group=1000.0) if demand else None
    settled(policy, 4, 7)


def test_it_never_raises(scheduler, monkeypatch):
    policy = autoscaling.GroupScaling("m", max_groups=8)
    monkeypatch.setattr(policy, "_scaler", None)  # as if it had a bug
    deadline = time.monotonic() + 10
    while policy._seen < 3:
        assert policy(context(2)) == (2, {})
        assert time.monotonic() < deadline
    scheduler.answer = "not a demand"
    time.sleep(0.05)
    assert [t for t in threading.enumerate() if t.name == "demand"], "it asks on"


def test_the_application_gives_serve_our_policy_and_leaves_the_damping_to_it():
    model = {"model_loading_config": {"model_id": "m", "model_source": "org/name"}}
    scaled = {"min_replicas": 0, "max_replicas": 3, "initial_replicas": 1, "downscale_delay_s": 7.0}
    deployment = {"num_replicas": "auto", "autoscaling_config": scaled}
    default = {"policy_function": "ray.serve.autoscaling_policy:default_autoscaling_policy"}
    theirs = {"autoscaling_config": {"max_replicas": 2, "policy": default}}
    others = [
        {"model_loading_config": {"model_id": "t", "model_source": "org/t"}, "deployment_config": theirs},
        {"model_loading_config": {"model_id": "f", "model_source": "org/f"}, "deployment_config": {"num_replicas": 2}},
    ]
    config = ApplicationConfig.parse({"llm_configs": [{**model, "deployment_config": deployment}, *others]})
    ours, other, fixed = (
        g._bound_deployment._deployment_config for g in application(config)._bound_deployment.init_args[2:]
    )
    scaling: AutoscalingConfig = ours.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (0, 1, 3)
    assert scaling.upscale_delay_s == scaling.downscale_delay_s == scaling.downscale_to_zero_delay_s == 0.0
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)  # as the controller does
    assert policy.model == "m" and policy._scaler.options == config.models[0].scaling
    assert ours.max_constructor_retry_count == 3 and fixed.max_constructor_retry_count == 1
    assert other.autoscaling_config.policy.is_default_policy_function()
    assert fixed.autoscaling_config is None and fixed.num_replicas == 2

"""The application's arguments: what is taken, what is refused, and in which words."""

import copy
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pagedray.cluster import config as module
from pagedray.cluster.config import ApplicationConfig, SchedulerOptions, read_config, read_config_file
from pagedray.cluster.openai.file_store import FileOptions
from pagedray.scheduler.autoscaling import ScalingOptions
from pagedray.scheduler.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def one(model_id="m", **section):
    """Arguments with one model."""
    return {"llm_configs": [{"model_loading_config": {"model_id": model_id, "model_source": "org/name"}, **section}]}


def roles(prefill=None, decode=None):
    """Serve LLM's arguments for prefill and decode apart."""
    (model,) = one()["llm_configs"]
    return {"prefill_config": {**model, **(prefill or {})}, "decode_config": {**model, **(decode or {})}}


def refusal(args):
    with pytest.raises(ConfigError) as error:
        ApplicationConfig.parse(args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def demo(monkeypatch, tmp_path):
    path = tmp_path / "demo.gguf"
    path.touch()
    monkeypatch.setenv("PAGEDRAY_DEMO_MODEL", str(path))
    return path


def test_a_whole_config():
    args = {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "a", "model_source": "org/a", "tokenizer_source": "org/t"},
                "engine_kwargs": {"max_batch_size": 8, "max_seq_length": 256, "kv_cache_memory": "1GiB"},
                "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}},
                "runtime_env": {"env_vars": {"A": "b"}},
            },
            {"model_loading_config": {"model_id": "org/b"}, "deployment_config": {"num_replicas": 2}},
        ],
        "ingress": {"num_replicas": 2, "max_ongoing_requests": 100},
        "scheduler": {"max_queued_requests": 7, "max_queue_seconds": 3},
        "files": {"path": "/a", "max_file_bytes": 5, "batch_concurrency": 2},
    }
    before = copy.deepcopy(args)
    config = ApplicationConfig.parse(args)
    a, b = config.models
    assert (a.model_id, a.engine.model, a.engine.tokenizer) == ("a", "org/a", "org/t")
    assert (a.engine.max_num_seqs, a.engine.max_model_len, a.engine.kv_cache_memory) == (8, 256, 2**30)
    assert a.deployment == {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 3},
        "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": {"A": "b"}}},
    }
    assert b.engine.model == "org/b", "without a source, the id is the source"
    assert b.deployment == {"num_replicas": 2}
    assert config.ingress == {"num_replicas": 2, "max_ongoing_requests": 100}
    assert config.scheduler == SchedulerOptions(7, 3)
    assert config.files == FileOptions("/a", max_file_bytes=5, batch_concurrency=2)
    assert args == before, "the arguments are only read"


def test_groups_are_scaled_by_our_policy_unless_another_is_named():
    def scaling(**deployment):
        return ApplicationConfig.parse(one(deployment_config=deployment)).models[0].scaling

    assert scaling() is None and scaling(num_replicas=2) is None
    assert scaling(num_replicas="auto") == ScalingOptions(1, 100)
    given = {
        "min_replicas": 0,
        "max_replicas": 4,
        "upscale_delay_s": 1,
        "downscale_delay_s": 60.0,
        "target_ongoing_requests": 64,  # as in Ray's own examples
        "policy": {"policy_kwargs": {"ttft_target": 0.5, "kv_utilization": 0.9}},
    }
    options = ScalingOptions(0, 4, 0.5, kv_utilization=0.9, upscale_delay=1, downscale_delay=60.0, idle_delay=60.0)
    assert scaling(autoscaling_config=given) == options
    assert scaling(autoscaling_config={**given, "downscale_to_zero_delay_s": 9}).idle_delay == 9
    named = {"policy_function": "pagedray.cluster.autoscaling:GroupScaling"}
    assert scaling(autoscaling_config={"max_replicas": 2, "policy": named}) == ScalingOptions(1, 2)
    theirs = {"policy_function": "my.module:policy", "policy_kwargs": {"anything": 1}}
    assert scaling(autoscaling_config={"max_replicas": 2, "policy": theirs}) is None
    models = ApplicationConfig.parse(one(deployment_config={"autoscaling_config": given})).models
    assert models[0].may_sleep and not ApplicationConfig.parse(one()).models[0].may_sleep


def test_what_is_left_out_or_empty_has_its_default():
    config = ApplicationConfig.parse(
        {**one(engine_kwargs=None, deployment_config=None, lora_config=None), "ingress": None}
    )
    assert config == ApplicationConfig.parse(one())
    assert config.models[0].deployment == config.ingress == {}
    assert config.scheduler == SchedulerOptions()
    assert config.files is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "llm_configs is missing"),
        ([], "the arguments must be a mapping"),
        ({"llm_configs": []}, "llm_configs is empty"),
        ({"llm_configs": {}}, "llm_configs must be a valid list, not {}"),
        ({"llm_configs": [3]}, "llm_configs[0] must be a mapping"),
        ({"llm_config": []}, "llm_config is not a setting; did you mean llm_configs?"),
        (one(engin_kwargs={}), "llm_configs[0].engin_kwargs is not a setting; did you mean engine_kwargs?"),
        (
            one(engine_kwargs={"max_num_seq": 1}),
            "llm_configs[0].engine_kwargs.max_num_seq is not a setting; did you mean max_num_seqs?",
        ),
        (one(engine_kwargs={"max_num_seqs": "8"}), "llm_configs[0].engine_kwargs.max_num_seqs must be an integer"),
        (one(engine_kwargs={1: 2}), "llm_configs[0].engine_kwargs[1]: names must be strings"),
        (one(engine_kwargs=[1]), "llm_configs[0].engine_kwargs must be a valid mapping, not [1]"),
        (one(engine_kwargs={"model": "x"}), "llm_configs[0].engine_kwargs.model is not a setting: say model_loading"),
        (one(engine_kwargs={"hf_token": True}), "llm_configs[0].engine_kwargs.hf_token must be a string"),
        (
            one(deployment_config={"request_router_config": {"request_router_class": "mine:Router"}}),
            "request_router_config.request_router_class is not supported: the global scheduler routes requests",
        ),
        (one(engine_kwargs={"cpu_offload_gb": False}), "cpu_offload_gb must be 0 or left out"),
        (
            one(engine_kwargs={"tensor_parallel_size": 2, "tensor_parallel_weights": [1]}),
            "llm_configs[0].engine_kwargs.tensor_parallel_weights has 1 entries",
        ),
        (one(model_id=""), "llm_configs[0].model_loading_config.model_id must have at least 1 character"),
        (one(model_id=3), "llm_configs[0].model_loading_config.model_id must be a valid string, not 3"),
        ({"llm_configs": [{}]}, "llm_configs[0].model_loading_config is missing"),
        ({"llm_configs": [{"model_loading_config": {}}]}, "llm_configs[0].model_loading_config.model_id is missing"),
        (
            {"llm_configs": [{"model_loading_config": {"model_id": "a", "model_source": {"bucket_uri": "s3://b"}}}]},
            "llm_configs[0].model_loading_config.model_source must be a folder, a .gguf file or a hub id",
        ),
        (one(lora_config={"x": 1}), "llm_configs[0].lora_config is not supported: adapters"),
        (one(llm_engine="SGLang"), "llm_configs[0].llm_engine must be left out"),
        (
            one(deployment_config={"num_replicas": 0}),
            "llm_configs[0].deployment_config.num_replicas must be an integer",
        ),
        (
            one(deployment_config={"num_replicas": True}),
            "deployment_config.num_replicas must be an integer of at least 1",
        ),
        (one(deployment_config={"user_config": {"a": 1}}), "deployment_config.user_config is not supported"),
        (
            one(deployment_config={"autoscaling_config": {"policy": {"policy_kwargs": {"ttft_targt": 1}}}}),
            "autoscaling_config.policy.policy_kwargs.ttft_targt is not a setting; did you mean ttft_target?",
        ),
        (
            one(deployment_config={"autoscaling_config": {"policy": {"policy_kwargs": {"utilization": 2.0}}}}),
            "policy_kwargs.utilization must be less than or equal to 1, not 2.0",
        ),
        (
            one(deployment_config={"autoscaling_config": {"policy": {"function": "x"}}}),
            "autoscaling_config.policy.function is not a setting; did you mean policy_function?",
        ),
        (one(deployment_config={"max_ongoing_requests": 0}), "max_ongoing_requests must be greater than or equal to 1"),
        (
            one(deployment_config={"autoscaling_config": {"min_replica": 1}}),
            "deployment_config.autoscaling_config.min_replica is not a setting; did you mean min_replicas?",
        ),
        (
            one(deployment_config={"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}),
            "autoscaling_config.min_replicas (3) is over max_replicas (2)",
        ),
        (
            one(deployment_config={"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}}),
            "llm_configs[0].deployment_config says num_replicas and autoscaling_config: keep one",
        ),
        (
            one(deployment_config={"ray_actor_options": {"num_cpu": 1}}),
            "llm_configs[0].deployment_config.ray_actor_options.num_cpu is not a setting; did you mean num_cpus?",
        ),
        (one(deployment_config={"ray_actor_options": {"num_cpus": 0}}), "llm_configs[0] gives a rank no CPU"),
        (
            one(placement_group_config={"bundles": [{"CPU": 1}] * 2}),
            "bundles must hold 1, one a rank of the worker group, not 2",
        ),
        (
            one(
                placement_group_config={"bundles": [{"CPU": 1}]},
                engine_kwargs={"tensor_parallel_size": 3, "pipeline_parallel_size": 2},
            ),
            "bundles must hold 6, one a rank of the worker group, not 1",
        ),
        (one(placement_group_config={"bundles": [{"CPU": "1"}]}), "bundles[0].CPU must be a valid number, not '1'"),
        (one(placement_group_config={}), "must have either bundle_per_worker or bundles"),
        (
            one(placement_group_config={"bundle_per_worker": {"CPU": 1}, "strategy": "TIGHT"}),
            "llm_configs[0].placement_group_config.strategy must be PACK",
        ),
        (
            one(
                placement_group_config={"bundle_per_worker": {"CPU": 1}},
                deployment_config={"ray_actor_options": {"num_cpus": 2}},
            ),
            "both say CPU: keep one",
        ),
        (
            {**one(), "scheduler": {"max_queued_requests": 0}},
            "scheduler.max_queued_requests must be greater than or equal",
        ),
        ({**one(), "files": {"path": "a"}}, "files.path must be an absolute path, not 'a'"),
        ({**one(), "files": {"path": "/a", "max_file_bytes": 0}}, "files.max_file_bytes must be greater than"),
        ({**one(), "files": {"max_file_bytes": 1}}, "files.path is missing"),
        ({**one(), "scheduler": {"max_queued": 1}}, "scheduler.max_queued is not a setting; did you mean"),
        (
            {**one(), "ingress": {"max_ongoing_requests": 1.5}},
            "ingress.max_ongoing_requests must be a valid integer, not 1.5",
        ),
        ({**one(), "ingress": {"num_replicas": 1}, "ingress_deployment_config": {"num_replicas": 1}}, "keep one"),
        (
            {"llm_configs": one()["llm_configs"] * 2},
            "llm_configs[1].model_loading_config.model_id is 'm', as in llm_configs[0]",
        ),
        (one(role="encode"), "llm_configs[0].role must be mixed or prefill or decode, not 'encode'"),
        ({"prefill_config": one()["llm_configs"][0]}, "decode_config is missing"),
        (
            {"prefill_config": {**one()["llm_configs"][0], "role": "decode"}, "decode_config": {}},
            "prefill_config.role must be left out, not 'decode'",
        ),
        ({"decode_config": {}, "prefill_config": []}, "prefill_config must be a mapping like an entry of llm_configs"),
        ({**roles(), "proxy_deployment_config": {"num_replicas": 2}}, "proxy_deployment_config is not supported: the"),
        (roles(decode={"engine_kwargs": {"block_size": 32}}), "block_size is 32, and 16 in prefill_config"),
        (
            roles(decode={"engine_kwargs": {"kv_cache_dtype": "int8"}}),
            "kv_cache_dtype is 'int8', and 'auto' in prefill",
        ),
        (roles(decode={"engine_kwargs": {"tool_call_parser": "hermes"}}), "say different parsers for one model"),
        (
            roles(prefill={"engine_kwargs": {"enable_prefix_caching": False}}),
            "prefill_config.role is prefill, which takes a kv_connector and enable_prefix_caching",
        ),
        (
            roles(decode={"engine_kwargs": {"kv_transfer_config": {"kv_role": "kv_producer"}}}),
            "role is decode: kv_transfer_config.kv_role must be kv_both or kv_consumer, not 'kv_producer'",
        ),
    ],
)
def test_refusals(args, message):
    assert message in refusal(args)


def test_prefill_and_decode_are_two_deployments_of_one_model():
    config = ApplicationConfig.parse(roles(decode={"deployment_config": {"num_replicas": 3}}))
    assert [(m.model_id, m.role, m.deployment) for m in config.models] == [
        ("m", "prefill", {}),
        ("m", "decode", {"num_replicas": 3}),
    ]
    (model,) = one()["llm_configs"]
    sections = [{**model, "role": "prefill"}, {**model, "role": "decode", "deployment_config": {"num_replicas": 3}}]
    assert ApplicationConfig.parse({"llm_configs": sections}) == config
    assert [m.role for m in ApplicationConfig.parse({"llm_configs": [*sections, model]}).models][2] == "mixed"


def test_vllms_kv_role_says_the_role_where_nothing_else_does():
    def role(kv_role, **section):
        kwargs = {"kv_transfer_config": {"kv_role": kv_role}}
        return ApplicationConfig.parse(one(engine_kwargs=kwargs, **section)).models[0].role

    assert [role(r) for r in ("kv_producer", "kv_consumer", "kv_both")] == ["prefill", "decode", "mixed"]
    assert role("kv_producer", role="mixed") == "mixed" and role("kv_both", role="decode") == "decode"


def test_vllm_settings_that_change_nothing_are_taken_with_a_line(caplog):
    kwargs = {"swap_space": 4, "compilation_config": {}, "trust_remote_code": False, "max_num_seqs": 3}
    with caplog.at_level(logging.INFO, logger="pagedray"):
        config = ApplicationConfig.parse(one(engine_kwargs=kwargs))
    assert config.models[0].engine.max_num_seqs == 3
    assert [r.getMessage().split(" changes nothing here: ")[0] for r in caplog.records] == [
        f"llm_configs[0].engine_kwargs.{name}" for name in kwargs if name != "max_num_seqs"
    ]


def test_the_ranks_hold_the_resources_and_the_replica_none():
    config = ApplicationConfig.parse(
        one(
            accelerator_type="A10G",
            deployment_config={"ray_actor_options": {"num_cpus": 3, "memory": 10, "runtime_env": {"env_vars": {}}}},
        )
    )
    assert config.models[0].deployment == {
        "placement_group_bundles": [{"CPU": 3, "memory": 10, "accelerator_type:A10G": 0.001, "GPU": 1}],
        "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": {}}},
    }
    group = {"bundle_per_worker": {"GPU": 1}, "strategy": "SPREAD"}
    deployment = ApplicationConfig.parse(one(placement_group_config=group)).models[0].deployment
    assert deployment == {"placement_group_bundles": [{"GPU": 1, "CPU": 1}], "placement_group_strategy": "SPREAD"}


def test_device_cuda_is_all_a_config_must_say_for_a_gpu(caplog):
    def model(device, **config):
        (model,) = ApplicationConfig.parse(one(engine_kwargs={"device": device}, **config)).models
        return model

    assert model("cuda").engine.device == "cuda"
    assert model("cuda").deployment == {"placement_group_bundles": [{"CPU": 1, "GPU": 1}]}
    half = {"placement_group_config": {"bundle_per_worker": {"GPU": 0.5}}}
    assert model("cuda", **half).deployment == {"placement_group_bundles": [{"CPU": 1, "GPU": 0.5}]}
    assert model("auto").deployment == model("cpu").deployment == {}
    assert model("auto").engine.device == "auto"
    assert model("auto", **half).engine.device == model("auto", accelerator_type="L4").engine.device == "cuda"
    assert model("cpu").engine.device == "cpu" and not caplog.records
    model("cpu", **half)
    assert "asks for GPUs, which nobody uses" in caplog.text
    assert [model("auto", accelerator_config={"kind": k}).engine.device for k in ("cpu", "gpu")] == ["cpu", "cuda"]
    assert "accelerator_config.kind must be cpu or gpu, not 'tpu'" in refusal(one(accelerator_config={"kind": "tpu"}))
    on_cpus = model("cpu", accelerator_type="L4").deployment
    assert on_cpus == {"placement_group_bundles": [{"CPU": 1, "accelerator_type:L4": 0.001}]}


def test_every_rank_has_a_bundle():
    def bundles(**config):
        kwargs = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        (model,) = ApplicationConfig.parse(one(engine_kwargs=kwargs, **config)).models
        return model.deployment.get("placement_group_bundles")

    assert bundles() is None  # one CPU each, says the application
    assert bundles(deployment_config={"ray_actor_options": {"num_cpus": 0.5}}) == [{"CPU": 0.5}] * 4
    assert bundles(placement_group_config={"bundle_per_worker": {"CPU": 2}}) == [{"CPU": 2}] * 4
    own = [{"CPU": n} for n in (1, 2, 3, 4)]
    assert bundles(placement_group_config={"bundles": own}) == own


def test_serve_llms_way_to_say_ingress_replicas():
    assert ApplicationConfig.parse(one(experimental_configs={"num_ingress_replicas": 3})).ingress == {"num_replicas": 3}
    args = {**one(), "ingress_deployment_config": {"max_ongoing_requests": 9}}
    assert ApplicationConfig.parse(args).ingress == {"max_ongoing_requests": 9}


def test_every_option_we_pass_on_is_one_that_serve_takes():
    """Our list must not outlive Ray's: `Deployment.options` and `AutoscalingConfig` are what we write for."""
    import inspect

    from ray.serve import Deployment
    from ray.serve.config import AutoscalingConfig

    taken = inspect.signature(Deployment.options).parameters
    passed = {*module._DeploymentOptions.model_fields, "placement_group_bundles", "placement_group_strategy"}
    assert passed <= set(taken)
    assert set(module._Autoscaling.model_fields) <= set(AutoscalingConfig.model_fields)


def test_the_demo_model_goes_by_its_id(demo, monkeypatch, tmp_path):
    args = {"llm_configs": [{"model_loading_config": {"model_id": "SmolLM2-135M-Instruct"}}]}
    assert ApplicationConfig.parse(args).models[0].engine.model == str(demo)
    monkeypatch.delenv("PAGEDRAY_DEMO_MODEL")
    monkeypatch.setenv("PAGEDRAY_CACHE", str(tmp_path / "empty"))
    assert "the demo model is not on this machine" in refusal(args)


def test_for_model(tmp_path):
    gguf = tmp_path / "tiny.Q8_0.gguf"
    gguf.touch()
    for source, name in (("org/name", "org/name"), (str(gguf), "tiny.Q8_0"), (str(tmp_path), tmp_path.name)):
        model = ApplicationConfig.parse(ApplicationConfig.for_model(source)).models[0]
        assert (model.model_id, model.engine.model) == (name, source)
    named = ApplicationConfig.parse(ApplicationConfig.for_model("org/name", "mine", {"max_num_seqs": 2})).models[0]
    assert (named.model_id, named.engine.max_num_seqs) == ("mine", 2)


@pytest.mark.parametrize(
    "path", sorted(p for p in CONFIGS.glob("*.yaml") if "ray-up" not in p.name), ids=lambda p: p.name
)
def test_the_configs_that_users_start_from(path, demo):
    config = ApplicationConfig.parse(read_config(path))
    assert all(m.engine.model for m in config.models)


def test_a_serve_config_of_serve_llm_is_read_as_it_stands(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "http_options: {host: 0.0.0.0, port: 9000}\n"
        "applications:\n"
        "- args:\n"
        "    llm_configs:\n"
        "    - model_loading_config: {model_id: q, model_source: Qwen/Qwen2.5-0.5B-Instruct}\n"
        "      accelerator_type: A10G\n"
        "      deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 2}}\n"
        "  import_path: ray.serve.llm:build_openai_app\n"
        "  name: llm_app\n"
        '  route_prefix: "/"\n'
    )
    file = read_config_file(path)
    assert file.http_options == {"host": "0.0.0.0", "port": 9000}
    assert ApplicationConfig.parse(file.args).models[0].model_id == "q"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llm_configs: [", "is not YAML"),
        ("- 1", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("a: 1\nb: 2\na: 3", "a stands twice, in lines 1 and 3"),
        ("llm_configs:\n- {x: {y: 1, y: 2}}", "y stands twice, in lines 2 and 2"),
        ("applications: []", "applications must hold one application"),
        (
            "applications: [{import_path: 'other:app', args: {}}]",
            "import_path must be pagedray.cluster.app:build, not 'other:app'",
        ),
        ("applications: [{import_path: 'pagedray.cluster.app:build'}]", "args must be a mapping"),
        (
            "applications: [{import_path: 'pagedray.cluster.app:build', args: {}, deployments: []}]",
            "deployments is not known",
        ),
        (
            "applications: [{import_path: 'pagedray.cluster.app:build', args: {}, route_prefix: /a}]",
            'route_prefix must be "/"',
        ),
    ],
)
def test_files_that_are_wrong(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "none.yaml")


def test_merge_keys_are_not_duplicates(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("base: &b {x: 1}\none: {<<: *b, y: 2}\n")
    assert read_config(path)["one"] == {"x": 1, "y": 2}


def test_a_model_may_stand_in_a_file_of_its_own(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model_loading_config: {model_id: filed, model_source: org/name}")
    assert ApplicationConfig.parse({"llm_configs": [str(path)]}).models[0].model_id == "filed"


def test_importing_it_loads_neither_torch_nor_ray():
    code = "import sys, pagedray.cluster.config; print([m for m in ('torch', 'ray') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_tenants_are_read_and_their_keys_are_not_kept():
    config = ApplicationConfig.parse(
        ApplicationConfig.for_model("m")
        | {"tenants": [{"name": "acme", "api_keys": ["sk-secret-key"], "weight": 2.0, "models": ["m"]}]}
    )
    (tenant,) = config.tenants
    assert (tenant.name, tenant.weight, tenant.models) == ("acme", 2.0, ("m",))
    assert "sk-secret-key" not in repr(config)


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([{"nam": "a"}], r"tenants\[0\]\.nam is not a setting; did you mean name"),
        ([{"name": "a", "api_keys": ["short"]}], r"tenants\[0\]\.api_keys\[0\] must have at least 8"),
        ([{"name": "a", "models": ["x"]}], r"tenants\[0\]\.models has 'x', which is not served"),
        ([{"name": "a"}, {"name": "a"}], "tenants has 'a' twice"),
        ([{"name": "a", "priority_class": "vip"}], r"tenants\[0\]: .*priority_class must be one of"),
        ([{"name": n, "api_keys": ["the same key"]} for n in "ab"], "'a' and 'b' have the same key"),
    ],
)
def test_wrong_tenants_are_refused(tenants, message):
    with pytest.raises(ConfigError, match=message):
        ApplicationConfig.parse(ApplicationConfig.for_model("m") | {"tenants": tenants})


def test_tenants_may_stand_in_a_file_of_their_own(tmp_path):
    """As a Kubernetes Secret is mounted: its keys stand in no manifest."""
    secret = tmp_path / "tenants.yaml"
    secret.write_text("tenants:\n  - {name: acme, api_keys: [sk-secret-key]}\n")
    args = ApplicationConfig.for_model("m") | {"tenants": str(secret)}
    assert ApplicationConfig.parse(args) == ApplicationConfig.parse(
        ApplicationConfig.for_model("m") | {"tenants": [{"name": "acme", "api_keys": ["sk-secret-key"]}]}
    )
    for content, message in (
        ("tenants: []", "tenants.yaml.tenants .*at least 1"),
        ("[]", "tenants.yaml must hold a mapping with tenants"),
        ("tenant: []", "tenants.yaml.tenant is not a setting; did you mean tenants"),
        ("tenants: [{name: a, weight: 0}]", r"tenants\[0\].weight"),
    ):
        secret.write_text(content)
        with pytest.raises(ConfigError, match=message):
            ApplicationConfig.parse(args)
    secret.unlink()
    with pytest.raises(ConfigError, match="tenants.yaml: No such file"):
        ApplicationConfig.parse(args)
    with pytest.raises(ConfigError, match="tenants must be a list of tenants, or the path of a file"):
        ApplicationConfig.parse(args | {"tenants": 3})

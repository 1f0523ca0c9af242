"""Documents for Ray Serve LLM, in the shapes that Ray's documentation has: they work when `import_path` is changed.

What we cannot do is refused by name, and what changes nothing here is said in a line.
"""

import logging

import pytest
import yaml

from pagedray.cluster.config import IMPORT_PATH, ApplicationConfig, read_config_file
from pagedray.scheduler.errors import ConfigError

QUICK_START = """
applications:
- args:
    llm_configs:
        - model_loading_config: {model_id: qwen-0.5b, model_source: Qwen/Qwen2.5-0.5B-Instruct}
          accelerator_type: A10G
          deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 2}}
        - model_loading_config: {model_id: qwen-1.5b, model_source: Qwen/Qwen2.5-1.5B-Instruct}
          accelerator_type: A10G
          deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 2}}
  import_path: ray.serve.llm:build_openai_app
  name: llm_app
  route_prefix: "/"
"""

ON_KUBERAY = """
applications:
- name: llms
  import_path: ray.serve.llm:build_openai_app
  route_prefix: "/"
  args:
    llm_configs:
    - model_loading_config: {model_id: qwen2.5-7b-instruct, model_source: Qwen/Qwen2.5-7B-Instruct}
      engine_kwargs: {dtype: bfloat16, max_model_len: 1024, device: auto, gpu_memory_utilization: 0.75}
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 4, target_ongoing_requests: 64}
        max_ongoing_requests: 128
"""

GATED = """
applications:
- name: my-small-llm-app
  route_prefix: "/"
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
      - model_loading_config: {model_id: my-llama-3.1-8B, model_source: meta-llama/Llama-3.1-8B-Instruct}
        accelerator_type: L4
        engine_kwargs: {max_model_len: 8192, hf_token: hf_abc}
"""

CROSS_NODE = """
applications:
- name: llm_app
  route_prefix: "/"
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: llama-3.1-8b, model_source: meta-llama/Llama-3.1-8B-Instruct}
      accelerator_type: A100
      engine_kwargs:
        tensor_parallel_size: 2
        pipeline_parallel_size: 2
        distributed_executor_backend: ray
        max_model_len: 8192
        enable_chunked_prefill: true
        max_num_batched_tokens: 4096
      placement_group_config: {bundles: [{GPU: 1}, {GPU: 1}, {GPU: 1}, {GPU: 1}], strategy: SPREAD}
      runtime_env: {env_vars: {VLLM_USE_V1: "1"}}
"""

PREFIX_AWARE = """
applications:
- name: llm_app
  route_prefix: "/"
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: qwen-0.5b, model_source: Qwen/Qwen2.5-0.5B-Instruct}
      deployment_config:
        num_replicas: auto
        request_router_config:
          request_router_class: ray.serve.llm.request_router.PrefixCacheAffinityRouter
          request_router_kwargs: {imbalanced_threshold: 10}
      engine_kwargs: {trust_remote_code: true, enable_prefix_caching: true}
      experimental_configs: {stream_batching_interval_ms: 50, num_ingress_replicas: 2}
      log_engine_metrics: true
"""

DOCUMENTS = {
    "quick start": QUICK_START,
    "on KubeRay": ON_KUBERAY,
    "gated model": GATED,
    "cross-node": CROSS_NODE,
    "prefix-aware": PREFIX_AWARE,
}


def parsed(text, folder):
    """With only `import_path` changed."""
    path = folder / "config.yaml"
    path.write_text(text.replace("ray.serve.llm:build_openai_app", IMPORT_PATH))
    return ApplicationConfig.parse(read_config_file(path).args)


@pytest.mark.parametrize("text", DOCUMENTS.values(), ids=DOCUMENTS)
def test_it_works_with_only_its_import_path_changed(text, tmp_path):
    from ray.serve.schema import ServeDeploySchema

    config = parsed(text, tmp_path)
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert [m.model_id for m in config.models] == [
        section["model_loading_config"]["model_id"] for section in application.args["llm_configs"]
    ]


def test_what_it_says_is_done(tmp_path):
    quick = parsed(QUICK_START, tmp_path).models[1]
    assert quick.deployment["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 2}
    assert quick.deployment["placement_group_bundles"] == [{"CPU": 1, "accelerator_type:A10G": 0.001, "GPU": 1}]
    assert quick.engine.device == "cuda"
    (kuberay,) = parsed(ON_KUBERAY, tmp_path).models
    assert (kuberay.engine.max_model_len, kuberay.engine.gpu_memory_utilization) == (1024, 0.75)
    assert kuberay.deployment["max_ongoing_requests"] == 128
    (across,) = parsed(CROSS_NODE, tmp_path).models
    assert across.engine.world_size == 4 and across.deployment["placement_group_strategy"] == "SPREAD"
    assert all(bundle["GPU"] == 1 for bundle in across.deployment["placement_group_bundles"])
    aware = parsed(PREFIX_AWARE, tmp_path)
    assert "request_router_config" not in aware.models[0].deployment and aware.ingress["num_replicas"] == 2


def test_the_ingress_gets_the_token_of_the_hub_too(tmp_path):
    """It fetches the tokenizer of a gated model."""
    gated = parsed(GATED, tmp_path)
    for options in (gated.ingress, gated.models[0].deployment):
        assert options["ray_actor_options"] == {"num_cpus": 0, "runtime_env": {"env_vars": {"HF_TOKEN": "hf_abc"}}}
    by_environment = yaml.safe_load(CROSS_NODE.replace("VLLM_USE_V1", "HUGGING_FACE_HUB_TOKEN"))["applications"][0][
        "args"
    ]
    mine = {"ray_actor_options": {"num_cpus": 2, "runtime_env": {"env_vars": {"A": "b"}}}}
    config = ApplicationConfig.parse(by_environment | {"ingress": mine})
    variables = {"HUGGING_FACE_HUB_TOKEN": "1", "A": "b"}
    assert config.ingress["ray_actor_options"] == {"num_cpus": 2, "runtime_env": {"env_vars": variables}}


def test_models_may_stand_in_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("qwen-0.5b", "qwen-1.5b"):
        loading = {"model_id": name, "model_source": "Qwen/Qwen2.5-0.5B-Instruct"}
        (tmp_path / "models" / f"{name}.yaml").write_text(yaml.safe_dump({"model_loading_config": loading}))
    text = """
    applications:
    - args: {llm_configs: [models/qwen-0.5b.yaml, models/qwen-1.5b.yaml]}
      import_path: ray.serve.llm:build_openai_app
      name: llm_app
      route_prefix: "/"
    """
    assert [m.model_id for m in parsed(text, tmp_path).models] == ["qwen-0.5b", "qwen-1.5b"]


def test_what_changes_nothing_is_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "pagedray"):
        parsed(PREFIX_AWARE, tmp_path)
    for key in ("trust_remote_code", "request_router_config"):
        assert any(key in line and "changes nothing here" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"lora_config": {"dynamic_lora_loading_path": "s3://a"}}, "lora_config is not supported: adapters"),
        ({"server_cls": "a:B"}, "server_cls is not supported: PagedRay has its own server"),
        ({"llm_engine": "SGLang"}, "llm_engine must be left out"),
        ({"engine_kwargs": {"runner": "pooling"}}, "runner must be 'auto' or 'generate' or left out"),
        ({"engine_kwargs": {"data_parallel_size": 2}}, "num_replicas says how many copies run"),
        ({"engine_kwargs": {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}}, "kv_connector must be"),
        ({"engine_kwargs": {"tool_call_parser": "qwen3_coder"}}, "tool_call_parser must be"),
        ({"deployment_config": {"name": "x"}}, "name is not supported: deployments are named after what they are"),
        ({"model_loading_config": {"model_id": "a", "model_source": {"bucket_uri": "s3://b"}}}, "mirrors in object"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(section, message):
    loading = {"model_loading_config": {"model_id": "a", "model_source": "org/a"}}
    with pytest.raises(ConfigError) as error:
        ApplicationConfig.parse({"llm_configs": [loading | section]})
    assert message in str(error.value) and str(error.value).startswith("llm_configs[0].")

"""Fixtures that several folders of tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hosts
import pytest
from hypothesis import settings

settings.register_profile("pagedray", deadline=None)  # how long an example takes says something of the machine
settings.load_profile("pagedray")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's .gguf: PAGEDRAY_DEMO_MODEL, else the cache."""
    from pagedray.cluster.demo_model import find

    path = find()
    if path is None:
        pytest.skip("no demo model: set PAGEDRAY_DEMO_MODEL, or run python -m pagedray.cluster.demo_model")
    return path


@pytest.fixture
def round_kv(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`round_kv(model, rounding)`: from now on transformers' Llama sees keys and values as a cache would give them."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def use(model: Any, rounding: Callable[[Any], Any]) -> None:
        def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
            return plain(module, query, rounding(key), rounding(value), *args, **options)

        model.set_attn_implementation("eager")
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)

    return use


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """A factory of tiny, seeded models of transformers: `model = tiny_llama(tie_word_embeddings=True)`.

    Keywords are the configuration's, over tiny defaults; `kind` is "Llama", "Mistral" or "Qwen2"; `seed` makes another
    model. Save one with `model.save_pretrained(folder)`.
    """

    def make(kind: str = "Llama", seed: int = 0, **config: Any) -> Any:
        import torch
        import transformers

        tiny = {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            settings = getattr(transformers, f"{kind}Config")(**(tiny | config))
            model = getattr(transformers, f"{kind}ForCausalLM")(settings)
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", ".bias")):  # ones and zeros otherwise, which would hide a mix-up
                    torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def transformers_config() -> Callable[..., Any]:
    """A function from our `ModelConfig`, with RoPE unscaled, to transformers' `LlamaConfig`; keywords are its own."""

    def convert(config: Any, **settings: Any) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
            **settings,
        )

    return convert


@pytest.fixture(scope="session")
def start_hosts() -> Iterator[Callable[..., hosts.Network]]:
    """A function that starts N hosts, each with a network, processes and disks of its own: see `tests/hosts.py`.

    Close what it gives (`with start_hosts(2) as network`) where idle hosts would be in the way of other tests. Skips,
    saying why, where this machine cannot have hosts.
    """
    networks: list[hosts.Network] = []

    def start(num_hosts: int = 2, **options: Any) -> hosts.Network:
        try:
            networks.append(hosts.Network(num_hosts, **options))
        except hosts.Unavailable as reason:
            pytest.skip(f"no hosts: {reason}")
        return networks[-1]

    yield start
    for network in networks:
        network.close()

"""Tiny models with a tokenizer, which tests that deploy something serve."""

import functools
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cluster"))  # for fake_engine: these tests may run alone


@pytest.fixture(scope="session")
def tiny_folder(tiny_llama, tmp_path_factory):
    """A function that makes a servable folder of a tiny model; each seed another model."""
    from fake_engine import byte_tokenizer
    from transformers import PreTrainedTokenizerFast

    @functools.cache
    def make(seed: int = 0) -> str:
        folder = tmp_path_factory.mktemp("tiny")
        tiny_llama(vocab_size=300, max_position_embeddings=512, initializer_range=0.1, seed=seed).save_pretrained(
            folder
        )
        PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend).save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture
def broken_folder(tmp_path):
    """A model that no version of ours can serve."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}))
    return str(tmp_path)

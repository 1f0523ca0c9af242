"""`cos_sin_table` is transformers' table, to the bit."""

import pytest
import torch

from pagedray.scheduler.errors import CheckpointError
from pagedray.workers.config import RopeConfig
from pagedray.workers.rope import ROPE_TYPES, cos_sin_table

HEAD_DIM, LENGTH = 64, 1024
CASES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, all settings": {
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn, attention factor": {"factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
}


def transformers_table(kind: str, settings: dict, length: int) -> torch.Tensor:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HEAD_DIM * 4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": kind, "rope_theta": 50000.0, **settings},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), dim=-1)


def ours(kind: str, settings: dict, length: int) -> torch.Tensor:
    settings = {"original_max_position_embeddings": LENGTH, **settings}
    return cos_sin_table(RopeConfig(theta=50000.0, type=kind, **settings), HEAD_DIM, length)


@pytest.mark.parametrize("case", CASES)
def test_table_is_that_of_transformers(case):
    kind, settings = case.split(",")[0], CASES[case]
    table = ours(kind, settings, LENGTH)
    assert table.dtype == torch.float32 and table.shape == (LENGTH, HEAD_DIM)
    assert torch.equal(table, transformers_table(kind, settings, LENGTH))


def test_every_type_is_compared():
    assert {case.split(",")[0] for case in CASES} == set(ROPE_TYPES)


def test_dynamic_beyond_the_original_length_is_scaled_for_the_whole_table():
    settings = CASES["dynamic"]
    long = ours("dynamic", settings, 2 * LENGTH)
    assert torch.allclose(long, transformers_table("dynamic", settings, 2 * LENGTH), atol=1e-6)
    assert not torch.equal(long[:LENGTH], ours("dynamic", settings, LENGTH))
    assert torch.equal(ours("dynamic", settings, LENGTH // 2), ours("default", {}, LENGTH // 2))


def test_unknown_type_is_refused_by_name():
    with pytest.raises(CheckpointError, match="longrope.*supported: default"):
        cos_sin_table(RopeConfig(type="longrope"), HEAD_DIM, 8)


@pytest.mark.parametrize("kind", ["dynamic", "llama3", "yarn"])
def test_missing_original_length_is_refused(kind):
    with pytest.raises(CheckpointError, match="original_max_position_embeddings"):
        cos_sin_table(RopeConfig(type=kind, factor=2.0), HEAD_DIM, 8)

"""What quantized weights and KV cost: perplexity and KL divergence on a text that every Python brings along."""

import math
import pydoc_data.topics

import pytest
import torch

from pagedray.kernels import ops
from pagedray.workers.checkpoint.load import load_weights, open_checkpoint
from pagedray.workers.kv_cache import allocate
from pagedray.workers.models.decoder import Decoder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WINDOW, WINDOWS = 1024, 4


@pytest.fixture(scope="module")
def windows(demo_model):
    """4,096 tokens of Python's language reference: [4, 1024]."""
    from pagedray.cluster.text.tokenizer import Tokenizer

    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in ("assignment", "binary", "calls", "class", "customization", "import"))
    ids = Tokenizer.load(str(demo_model)).encode(text)
    assert len(ids) >= WINDOW * WINDOWS, f"{len(ids)} tokens"
    return torch.tensor(ids[: WINDOW * WINDOWS]).view(WINDOWS, WINDOW)


@pytest.fixture(scope="module")
def log_probs(demo_model):
    """A function from a model's dtype, its quantization and a window to log-probabilities [1024, vocab]."""
    checkpoint, models = open_checkpoint(str(demo_model)), {}
    metadata = ops.AttentionMetadata(
        torch.tensor([0, WINDOW], dtype=torch.int32),
        torch.tensor([WINDOW], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.arange(WINDOW),
        WINDOW,
        WINDOW,
    )

    def compute(dtype, quantization, ids, kv_dtype=None):
        if (dtype, quantization) not in models:
            weights = load_weights(checkpoint, dtype, quantization=quantization)
            models[dtype, quantization] = Decoder(checkpoint.config, weights, WINDOW)
        model = models[dtype, quantization]
        caches = allocate(checkpoint.config, 1, WINDOW, kv_dtype or dtype)
        with torch.inference_mode():
            return model.logits(model.forward(model.embed(ids), torch.arange(WINDOW), caches, metadata)).log_softmax(-1)

    return compute


def compare(log_probs, windows, to, *others):
    """For each of the other models: how its perplexity differs, and the mean KL divergence of a token, in nats."""
    losses, divergences = ([0.0] * (1 + len(others)) for _ in range(2))
    for ids in windows:
        following = ids[1:].unsqueeze(1)
        p = log_probs(*to[:2], ids, *to[2:])
        for i, model in enumerate((to, *others)):
            q = log_probs(*model[:2], ids, *model[2:]) if i else p
            losses[i] -= float(q[:-1].gather(1, following).double().mean()) / WINDOWS
            divergences[i] += float((p.exp() * (p - q)).sum(-1).double().mean()) / WINDOWS
    changes = [math.exp(loss - losses[0]) - 1 for loss in losses]
    for model, loss, change, divergence in zip((to, *others), losses, changes, divergences, strict=True):
        print(f"\n{model}: perplexity {math.exp(loss):.4f} ({change:+.3%}), KL a token {divergence:.6f}")
    return list(zip(changes, divergences, strict=True))[1:]


def test_int8_is_within_half_a_percent_of_fp32(log_probs, windows):
    others = [(dtype, "int8") for dtype in (torch.float32, torch.bfloat16)]
    for change, divergence in compare(log_probs, windows, (torch.float32, "none"), *others):
        assert abs(change) < 0.005 and divergence < 0.005


def test_kv_in_int8_is_within_half_a_percent(log_probs, windows):
    for dtype in (torch.float32, torch.bfloat16):
        ((change, divergence),) = compare(log_probs, windows, (dtype, "none"), (dtype, "none", torch.int8))
        assert abs(change) < 0.005 and 0 < divergence < 0.005


def test_a_gguf_file_in_its_own_blocks_is_the_dequantized_model(log_probs, windows):
    ((change, divergence),) = compare(log_probs, windows, (torch.bfloat16, "none"), (torch.bfloat16, "auto"))
    assert change == 0 and divergence == 0

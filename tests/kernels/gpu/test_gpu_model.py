"""The door gives the Triton kernels where they are asked for, and a whole model runs through them."""

import os

import pytest
import torch

from pagedray.kernels import ops
from pagedray.kernels.gpu import formats, launch, linear, sampling
from pagedray.scheduler.errors import ConfigError
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.workers.checkpoint.load import open_checkpoint
from pagedray.workers.config import EngineConfig
from pagedray.workers.engine import Engine

long = pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1")


@pytest.fixture
def triton_kernels(monkeypatch):
    """PAGEDRAY_KERNELS=triton, whatever the door has opened on before."""
    monkeypatch.setattr(ops, "_tables", {})
    monkeypatch.setenv("PAGEDRAY_KERNELS", "triton")


def generate(model, prompts, max_tokens, **settings):
    engine = Engine(EngineConfig.from_kwargs(model=str(model), dtype="float32", cpu_threads=1, **settings))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    outputs = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), tuple(prompt), params))
        outputs[str(i)] = []
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
    return list(outputs.values())


def test_the_door_opens_on_triton(triton_kernels):
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    assert ops.greedy(logits).tolist() == [1]
    assert ops._tables["cpu"]["greedy"] is sampling.greedy


def test_without_the_interpreter_a_cpu_is_refused(triton_kernels, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs, "propagate_env", False)  # or putting it back would tell other processes
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        ops.greedy(torch.zeros(1, 3))


def test_batch_invariance_is_a_setting(monkeypatch):
    asked = []
    monkeypatch.setattr(linear, "linear", lambda *args, batch_invariant: asked.append(batch_invariant))
    for value in ("1", "0", ""):
        monkeypatch.setenv("PAGEDRAY_BATCH_INVARIANT", value)
        launch.operations()["linear"](None, None)
    assert asked == [True, False, False]


@pytest.mark.parametrize("invariant", ["0", "1"])
def test_a_tiny_model_equals_transformers(triton_kernels, monkeypatch, tiny_llama, tmp_path, invariant):
    """Prompts of different lengths in chunks of 8: steps of prefill, of decode and of both."""
    monkeypatch.setenv("PAGEDRAY_BATCH_INVARIANT", invariant)
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    prompts = [[3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37], [41, 43], [47]]
    outputs = generate(tmp_path, prompts, 5, num_kv_blocks=32, max_model_len=64, max_num_batched_tokens=8)
    assert outputs == [of_transformers(model, p, 5) for p in prompts]


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_tiny_model_in_8_bits_equals_its_oracle(triton_kernels, tiny_llama, tmp_path, format):
    """transformers' model with each linear layer of its decoder replaced by the oracle of W8A8."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    model = tiny_llama(attention_bias=True, num_key_value_heads=1, initializer_range=0.3, **shape)
    model.save_pretrained(tmp_path)
    config = EngineConfig.from_kwargs(
        model=str(tmp_path), dtype="float32", cpu_threads=1, num_kv_blocks=4, max_model_len=32, quantization=format
    )
    engine = Engine(config)
    engine.add_request(Request("r", (3, 5, 7, 11), SamplingParams(temperature=0, max_tokens=2, seed=0, logprobs=1)))
    outputs = [output for _ in range(2) for output in engine.step()]
    tokens = [token for o in outputs for token in o.token_ids]
    logprobs = [p.logprob for o in outputs for p in o.logprobs]

    def expected():
        with torch.inference_mode():
            logits = model(torch.tensor([[3, 5, 7, 11, tokens[0]]])).logits[0, -2:]
        best = logits.log_softmax(-1).max(-1)
        return best.indices.tolist(), best.values.tolist()

    _, plain = expected()
    for layer in (model.model.layers[0].self_attn, model.model.layers[0].mlp):
        for name, child in list(layer.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(layer, name, Rounded(child, format))
    assert (tokens, logprobs) == (expected()[0], pytest.approx(expected()[1], abs=2e-3))
    assert plain != pytest.approx(logprobs, abs=2e-3), "rounding shows"


def test_kv_in_fp8_equals_its_oracle(triton_kernels, tiny_llama, tmp_path, round_kv):
    """transformers' model with keys and values rounded to e4m3, as vLLM's cache of that name does unscaled."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    model = tiny_llama(num_key_value_heads=1, initializer_range=0.3, **shape)
    model.save_pretrained(tmp_path)
    engine = Engine(
        EngineConfig.from_kwargs(
            model=str(tmp_path), dtype="float32", cpu_threads=1, num_kv_blocks=4, max_model_len=32, kv_cache_dtype="fp8"
        )
    )
    prompt = (3, 5, 7, 11, 13, 17)
    engine.add_request(Request("r", prompt, SamplingParams(temperature=0, max_tokens=3, seed=0, logprobs=1)))
    outputs = [output for _ in range(3) for output in engine.step()]
    tokens = [token for o in outputs for token in o.token_ids]
    logprobs = [p.logprob for o in outputs for p in o.logprobs]

    def expected():
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, -3:]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    plain = expected()
    round_kv(model, lambda rows: rows.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert logprobs == pytest.approx(expected(), abs=2e-3)
    assert plain != pytest.approx(logprobs, abs=2e-3), "rounding shows"


class Rounded(torch.nn.Module):
    def __init__(self, linear, format):
        super().__init__()
        self.weight, self.bias = formats.quantize(linear.weight.detach(), format), linear.bias

    def forward(self, x):
        return formats.quantized_linear(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def test_fp8_where_no_kernel_computes_in_it(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantization is fp8, which the kernels for cpu do not compute in"):
        generate(tmp_path, [[1]], 1, quantization="fp8")
    with pytest.raises(ValueError, match="the kernels for cpu do not compute in int8"):
        ops.quantize_linear(torch.ones(4, 32), None, "int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts, length",
    [(["The capital of France is"], 2), pytest.param(["The capital of France is", "1 2 3 4"], 6, marks=long)],
    ids=["one prompt", "two prompts"],
)
def test_smollm2_equals_transformers(triton_kernels, demo_model, transformers_config, texts, length):
    from transformers import LlamaForCausalLM

    from pagedray.cluster.text.tokenizer import Tokenizer

    checkpoint = open_checkpoint(str(demo_model))
    model = LlamaForCausalLM(transformers_config(checkpoint.config)).eval()
    model.load_state_dict({n: checkpoint.read(n).float() for n in checkpoint.names()}, strict=False)
    model.tie_weights()
    tokenizer = Tokenizer.load(str(demo_model))
    prompts = [tokenizer.encode(text) for text in texts]
    outputs = generate(demo_model, prompts, length, num_kv_blocks=16, max_model_len=64)
    assert outputs == [of_transformers(model, p, length) for p in prompts]


def of_transformers(model, prompt, length):
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]

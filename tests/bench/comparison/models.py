"""The same weights for everybody: a Hugging Face folder in bf16, and GGUF files in bf16, q8_0 and q4_0 made of it.

`smollm2` is the demo model, dequantized once from its GGUF. `1b` has random weights, made by a seed, in the shape of
Llama-3.2-1B's layers with the demo model's vocabulary: 1.07 billion parameters, tied.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pagedray.cluster.text.gguf_tokenizer import build_backend
from pagedray.workers.checkpoint.gguf_file import GGUFFile
from pagedray.workers.checkpoint.load import open_checkpoint

from .environments import Unavailable

_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_QUANTIZE_SECONDS = 600.0


@dataclass(frozen=True)
class Models:
    """Makes what is asked for on first use, below `folder`."""

    folder: Path
    demo: Path  # the demo model's .gguf
    say: Callable[[str], None]

    def huggingface(self, model: str) -> Path:
        """A folder with config.json, tokenizer.json and model.safetensors (bf16)."""
        path = self.folder / f"{model}-bf16"
        if not (path / "config.json").exists():
            self.say(f"writing {path}")
            part = _emptied(path.with_suffix(".part"))
            config = _config(self.demo, _1B if model == "1b" else {})
            tensors = _random(config) if model == "1b" else _dequantized(self.demo)
            save_file(tensors, part / "model.safetensors", {"format": "pt"})
            _write_tokenizer(self.demo, part)
            (part / "config.json").write_text(json.dumps(config, indent=2))
            os.replace(part, path)
        return path

    def gguf(self, model: str, precision: str, llama_quantize: Path | None = None) -> Path:
        """A .gguf of those weights. Raises `Unavailable` for q8_0 and q4_0 without llama.cpp's `llama-quantize`."""
        path = self.folder / f"{model}-{precision}.gguf"
        if path.exists():
            return path
        part = path.with_suffix(".part")
        if precision == "bf16":
            folder = self.huggingface(model)
            self.say(f"writing {path}")
            _write_gguf(folder, self.demo, part)
        else:
            if llama_quantize is None:
                raise Unavailable(f"{path.name} is made by llama.cpp's llama-quantize, which is not here")
            source = self.gguf(model, "bf16")
            self.say(f"writing {path}")
            command = [llama_quantize, source, part, precision.upper()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_QUANTIZE_SECONDS)
            if done.returncode:
                raise Unavailable(f"llama-quantize failed: {done.stderr.strip()[-300:]}")
        os.replace(part, path)
        return path


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _config(demo: Path, changes: dict[str, int]) -> dict:
    model = open_checkpoint(str(demo)).config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope.theta,
        "tie_word_embeddings": True,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # the name before transformers 5
    } | changes


def _dequantized(demo: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(str(demo))
    names = checkpoint.names() - {"lm_head.weight"}  # the demo model's is tied
    return {name: checkpoint.read(name).to(torch.bfloat16).contiguous() for name in sorted(names)}


def _random(config: dict, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": norm.clone()}
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm.clone(),
            f"{at}.self_attn.q_proj.weight": matrix(q, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(kv, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(kv, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, q),
            f"{at}.post_attention_layernorm.weight": norm.clone(),
            f"{at}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return tensors


def _write_tokenizer(demo: Path, folder: Path) -> None:
    file = GGUFFile(demo)
    build_backend(file).save(str(folder / "tokenizer.json"))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos"):
        config[f"{name}_token"] = tokens[file.metadata[f"tokenizer.ggml.{name}_token_id"]]
    config["pad_token"] = config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# What llama.cpp calls each tensor.
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return f"{_GGUF_NAMES[name]}.weight"
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_GGUF_NAMES[rest]}.weight"


def _write_gguf(folder: Path, demo: Path, path: Path) -> None:
    """The demo model's metadata with the folder's sizes, and the folder's tensors: matrices in bf16, norms in fp32."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["head_dim"],
    }
    writer = GGUFWriter(path, "llama")
    for field in GGUFReader(demo).fields.values():
        if field.name.startswith(("GGUF.", "general.architecture", "general.file_type", "general.quantization")):
            continue
        kind, *rest = field.types
        value = sizes.get(field.name, field.contents())
        writer.add_key_value(field.name, value, kind, rest[-1] if kind == GGUFValueType.ARRAY else None)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():
            tensor = tensors.get_tensor(name).float()
            for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if projection in name:  # llama.cpp rotates neighboring pairs, Hugging Face the two halves of a head
                    halves = tensor.view(config[heads], 2, config["head_dim"] // 2, tensor.shape[1])
                    tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            kind = GGMLQuantizationType.BF16 if tensor.dim() == 2 else GGMLQuantizationType.F32
            writer.add_tensor(_gguf_name(name), quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Hugging Face folders: read back equal, fused in place, and refused where damaged."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedray.scheduler.errors import CheckpointError
from pagedray.workers.checkpoint.load import digest, load_weights, open_checkpoint
from pagedray.workers.checkpoint.locate import locate


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """A folder with a saved model, and its state dict."""

    def make(shards: bool = False, kind: str = "Llama", **config):
        model = tiny_llama(kind, **config)
        model.save_pretrained(tmp_path, max_shard_size="40KB" if shards else "5GB")
        return tmp_path, model.state_dict()

    return make


def edit(folder, change):
    """Rewrite model.safetensors through `change(tensors)`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def check_fused(weights, state, dtype=torch.float32):
    def stack(at, *names):
        return torch.cat([state[f"{at}.{name}"] for name in names]).to(dtype)

    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}"
        qkv = [f"self_attn.{x}_proj" for x in "qkv"]
        gate_up = [f"mlp.{x}_proj" for x in ("gate", "up")]
        for linear, names in (
            (layer.qkv, qkv),
            (layer.o, ["self_attn.o_proj"]),
            (layer.gate_up, gate_up),
            (layer.down, ["mlp.down_proj"]),
        ):
            assert torch.equal(linear.weight, stack(at, *(f"{n}.weight" for n in names)))
            if f"{at}.{names[0]}.bias" in state:
                assert torch.equal(linear.bias, stack(at, *(f"{n}.bias" for n in names)))
            else:
                assert linear.bias is None
        assert torch.equal(layer.input_norm, state[f"{at}.input_layernorm.weight"].to(dtype))
        assert torch.equal(layer.post_attention_norm, state[f"{at}.post_attention_layernorm.weight"].to(dtype))
    assert torch.equal(weights.embed_tokens, state["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(weights.norm, state["model.norm.weight"].to(dtype))
    assert torch.equal(weights.lm_head, state["lm_head.weight"].to(dtype))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"head_dim": 32}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
    ],
)
def test_weights_are_those_of_transformers(saved, shards, kind, config):
    folder, state = saved(shards, kind, **config)
    assert (folder / "model.safetensors.index.json").exists() is shards
    weights = load_weights(open_checkpoint(str(folder)), torch.float32)
    check_fused(weights, state)
    assert weights.lm_head is not weights.embed_tokens


def test_weights_are_converted_to_the_dtype_asked_for(saved):
    folder, state = saved()
    check_fused(load_weights(open_checkpoint(str(folder)), torch.bfloat16), state, torch.bfloat16)


def test_tied_head_is_the_same_tensor(saved):
    folder, state = saved(tie_word_embeddings=True)
    weights = load_weights(open_checkpoint(str(folder)), torch.float32)
    assert weights.lm_head is weights.embed_tokens
    check_fused(weights, state)


@pytest.mark.parametrize("different", [False, True])
def test_a_second_copy_of_a_tied_head_counts_where_it_differs(saved, different):
    folder, state = saved(tie_word_embeddings=True)
    head = state["model.embed_tokens.weight"] + (1.0 if different else 0.0)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    weights = load_weights(open_checkpoint(str(folder)), torch.float32)
    assert (weights.lm_head is weights.embed_tokens) is not different
    assert torch.equal(weights.lm_head, head)


def test_slices_are_those_of_the_whole(saved):
    folder, state = saved(shards=True)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.names() == set(state)
    name = "model.layers.1.mlp.down_proj.weight"
    assert checkpoint.shape(name) == tuple(state[name].shape)
    assert torch.equal(checkpoint.read(name), state[name])
    assert torch.equal(checkpoint.read(name, slice(3, 20), slice(5, 7)), state[name][3:20, 5:7])
    assert torch.equal(checkpoint.read(name, columns=slice(40, None)), state[name][:, 40:])
    assert torch.equal(checkpoint.read("model.norm.weight", slice(2, 9)), state["model.norm.weight"][2:9])


def test_progress_counts_bytes_up_to_all_of_them(saved):
    folder, state = saved()
    seen = []
    load_weights(open_checkpoint(str(folder)), torch.float32, lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() * 4 for tensor in state.values())
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_known_buffers_are_passed_over(saved):
    folder, _ = saved()
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_weights(open_checkpoint(str(folder)), torch.float32)


DAMAGE = {
    "missing": (
        lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"),
        r"model\.layers\.1\.self_attn\.k_proj\.weight is missing",
    ),
    "extra": (
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}),
        r"holds model\.layers\.2\.mlp\.up_proj\.weight, unknown",
    ),
    "shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}),
        r"model\.norm\.weight has shape \[65\]; the configuration asks for \[64\]",
    ),
    "transposed": (
        lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(64, 96)}),
        r"model\.embed_tokens\.weight has shape \[64, 96\]",
    ),
    "dtype": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
        r"model\.norm\.weight has dtype I8",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_tensors_that_do_not_fit_are_refused_by_name(saved, case):
    change, message = DAMAGE[case]
    folder, _ = saved()
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message) as refused:
        load_weights(open_checkpoint(str(folder)), torch.float32)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_what_cannot_be_read_is_not_called_damaged(saved):
    """A folder here, for root may read any file: the library says of both that they are missing."""
    folder, _ = saved()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Is a directory"):
        open_checkpoint(str(folder))


def test_damaged_files_are_refused(saved):
    folder, _ = saved()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for damaged in (whole[:-100], whole[: header // 2], b"", whole[:8] + b"\xff" * header + whole[8 + header :]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
            open_checkpoint(str(folder))


def test_index_and_shards_must_agree(saved):
    folder, _ = saved(shards=True)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, shard = next(iter(content["weight_map"].items()))

    content["weight_map"]["model.made_up.weight"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{shard} lacks model\.made_up\.weight"):
        open_checkpoint(str(folder))

    content["weight_map"]["model.made_up.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        open_checkpoint(str(folder))

    del content["weight_map"]["model.made_up.weight"]
    index.write_text(json.dumps(content))
    (folder / shard).unlink()
    with pytest.raises(CheckpointError, match=f"names {shard}, which is missing"):
        open_checkpoint(str(folder))

    index.write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        open_checkpoint(str(folder))


def test_folder_without_safetensors(saved):
    folder, _ = saved()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*found pytorch_model\.bin"):
        open_checkpoint(str(folder))


def test_locate_says_what_is_wrong(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither a config\.json nor a \.gguf"):
        locate(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files; name one: a\.gguf, b\.gguf"):
        locate(str(tmp_path))
    (tmp_path / "b.gguf").unlink()
    assert locate(str(tmp_path)) == locate(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"notes\.txt is not a \.gguf file"):
        locate(str(tmp_path / "notes.txt"))
    with pytest.raises(CheckpointError, match="does not exist"):
        locate(str(tmp_path / "missing"))


def test_hub_id_that_the_hub_does_not_give(monkeypatch):
    import huggingface_hub

    def offline(model, **_):
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"no network for {model}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="org/name is no folder or file here.*no network.*offline"):
        open_checkpoint("org/name")


def test_hub_id_is_fetched(monkeypatch, saved):
    import huggingface_hub

    folder, state = saved()
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **k: asked.update({model: k}) or folder)
    assert open_checkpoint("org/name").names() == set(state)
    assert "*.safetensors" in asked["org/name"]["allow_patterns"]
    locate("org/name", weights=False)
    assert "*.safetensors" not in asked["org/name"]["allow_patterns"]


def test_the_digest_is_of_the_weights(tiny_llama, tmp_path):
    for name, seed in (("first", 0), ("same", 0), ("trained further", 1)):
        tiny_llama(seed=seed).save_pretrained(tmp_path / name)
    first, same, other = (digest(open_checkpoint(str(tmp_path / n))) for n in ("first", "same", "trained further"))
    assert first == same != other

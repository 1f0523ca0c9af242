"""Where a model's files are, and what they say of it without its weights. Importing this does not load torch."""

import re
from pathlib import Path

from ...scheduler.errors import CheckpointError
from ..config import EngineConfig, ModelConfig
from .config import read_model_config, read_sampling_defaults
from .gguf import GGUFCheckpoint

_HUB_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")


def read_config(model: str) -> ModelConfig:
    """What a model is, from its headers. Raises `CheckpointError` where it is missing, damaged or not supported."""
    path = locate(model, weights=False)
    return GGUFCheckpoint(path).config if path.is_file() else read_model_config(path)


def sampling_defaults(engine: EngineConfig) -> dict[str, float]:
    """What holds for requests that do not say how they are sampled; a .gguf file says nothing of it."""
    if engine.generation_config == "vllm":
        return {}
    path = locate(engine.model, weights=False)
    return {} if path.is_file() else read_sampling_defaults(path)


def locate(model: str, weights: bool = True) -> Path:
    """The folder or .gguf file that `model` means, fetched from the hub where it is a hub id.

    `weights=False` fetches only what a tokenizer needs.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise CheckpointError(f"{path} is not a .gguf file; name a folder, a .gguf file or a hub id")
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or (not weights and (path / "tokenizer.json").exists()):
            return path
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise CheckpointError(
                f"{path} holds {len(ggufs)} .gguf files; name one: {', '.join(p.name for p in ggufs)}"
            )
        raise CheckpointError(f"{path} has neither a config.json nor a .gguf file")
    if not may_be_on_hub(model):
        raise CheckpointError(f"{model} does not exist; name a folder, a .gguf file or a hub id such as org/name")
    return _download(model, weights)


def may_be_on_hub(model: str) -> bool:
    """Whether it reads as a hub id, and is nothing here."""
    path = Path(model).expanduser()
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not model.startswith(".") and not model.endswith(".gguf")
    return bool(is_id) and not path.exists()


def _download(model: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and not needed for local models

    try:
        patterns = [*_HUB_FILES, *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # its tree of errors is wide: HTTP, file system, validation, offline mode
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{model} is no folder or file here, and the Hugging Face hub did not give it: {reason} "
            "(offline? download it elsewhere and name the folder)"
        ) from error

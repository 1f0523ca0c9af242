"""A Hugging Face folder: config.json and one or several safetensors files, read slice by slice from the page cache."""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.ops import QuantizedTensor
from ...scheduler.errors import CheckpointError
from .config import read_json, read_model_config

_WHOLE = slice(None)
_DTYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsCheckpoint:
    """The files are mapped, not read: a tensor costs memory only for the rows and columns asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_model_config(folder)
        self._slices = {}  # name: the file's lazy view of the tensor
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path, expected in _files(folder).items():
            shard = _open(path)
            names = set(shard.keys())
            if expected is not None and not expected <= names:
                raise CheckpointError(f"{path} lacks {min(expected - names)}, which the index says it holds")
            for name in sorted(names if expected is None else expected):
                view = shard.get_slice(name)
                if view.get_dtype() not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: {name} has dtype {view.get_dtype()}; supported: {', '.join(_DTYPES)}"
                    )
                self._slices[name] = view
                self._shapes[name] = tuple(view.get_shape())

    def names(self) -> frozenset[str]:
        return frozenset(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def num_bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * (int(self._slices[name].get_dtype().strip("BF")) // 8)

    def quantization(self, name: str) -> None:
        return None

    def read_blocks(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> QuantizedTensor:
        raise NotImplementedError(f"{name} is not quantized")

    def read(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> Tensor:
        """Those rows and columns, in the file's dtype. `columns` must be left out for a vector."""
        try:
            view = self._slices[name]
            return view[rows] if len(self._shapes[name]) == 1 else view[rows, columns]
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {error}") from None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Each safetensors file and the tensors to take from it; None is all. Resolves them as transformers does."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return {single: None}
    if not index.exists():
        other = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pth", ".pt"))
        found = f"; found {', '.join(other[:4])}" if other else ""
        raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} must hold a weight_map of tensor names to file names")
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        path = folder / file
        if Path(file).name != file:
            raise CheckpointError(f"{index}: {name} is said to be in {file!r}, which is not a file of this folder")
        if not path.exists():
            raise CheckpointError(f"{index} names {file}, which is missing (it holds {name})")
        files.setdefault(path, set()).add(name)  # type: ignore[union-attr]
    return files


def _open(path: Path):
    try:
        path.open("rb").close()  # safe_open takes what it may not read for missing
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from None

"""The front door: `LLM` and what it takes, and `__version__`. Importing it loads neither torch nor Ray."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from .cluster.llm import LLM
    from .scheduler.request import SamplingParams, StructuredOutputsParams

_HOMES = {
    "LLM": ".cluster.llm",
    "SamplingParams": ".scheduler.request",
    "StructuredOutputsParams": ".scheduler.request",
}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

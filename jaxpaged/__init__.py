"""jaxpaged: paged-attention inference for language models in JAX.

The names below load on first use, so that a client process never imports JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.llm import LLM
    from jaxpaged.sampling_params import ChatPrompt, Constraint, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "ChatPrompt", "Constraint", "SamplingParams"]

_HOMES = {
    "LLM": "jaxpaged.llm",
    "AsyncLLM": "jaxpaged.async_llm",
    "ChatPrompt": "jaxpaged.sampling_params",
    "Constraint": "jaxpaged.sampling_params",
    "SamplingParams": "jaxpaged.sampling_params",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""What a model on disk looks like to the rest of jaxpaged, whatever its files are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpaged.errors import CheckpointError


class Checkpoint(Protocol):
    """A located model. Making one reads no weights; each call of `tensor` reads one tensor.

    Attributes:
      name: under which the model is served.
      path: its folder, or its GGUF file.
      config: in the form and with the keys of a Hugging Face config.json.
      generation_config: likewise; empty when the model has none.
    """

    name: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name.

        Raises:
          CheckpointError: weight files are missing, truncated or contradict their index.
        """
        ...

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, linear weights as [out, in]; the caller owns the array.

        Raises:
          CheckpointError: there is no such tensor, or its file cannot be read.
        """
        ...


def eos_token_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """The end-of-sequence ids of all `configs` together; each names one, several or none.

    Raises:
      CheckpointError: one of them is no id.
    """
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        named = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in named):
            raise CheckpointError(f"eos_token_id={value!r} must be a token id or a list of them")
        ids.update(named)
    return frozenset(ids)

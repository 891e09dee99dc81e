"""What a model on disk looks like to the rest of jaxpaged, whatever its files are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np


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
    """The end-of-sequence ids of all `configs` together; each names one, several or none."""
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(value)
    return frozenset(ids)

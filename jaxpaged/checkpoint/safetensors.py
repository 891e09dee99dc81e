"""A folder in Hugging Face form: config.json, safetensors, perhaps sharded."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes NumPy, and so safetensors, know bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpaged.errors import CheckpointError, ModelNotFoundError

CONFIG_FILE = "config.json"
_SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A `Checkpoint` in a folder. Tensors keep the dtype in which they are stored."""

    def __init__(self, folder: Path, name: str):
        """Reads config.json and generation_config.json.

        Raises:
          ModelNotFoundError: the folder has no config.json.
          CheckpointError: one of the two is not a JSON object.
        """
        if not (folder / CONFIG_FILE).is_file():
            raise ModelNotFoundError(f"{folder} is not a model folder: it has no {CONFIG_FILE}")
        self.name = name
        self.path = folder
        self.config = _read_json(folder / CONFIG_FILE)
        generation_file = folder / "generation_config.json"
        self.generation_config = _read_json(generation_file) if generation_file.is_file() else {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(self._shard(name).get_slice(name).get_shape()) for name in self._shard_of
        }

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._shard_of:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        try:
            return self._shard(name).get_tensor(name)
        except (SafetensorError, TypeError) as error:
            raise CheckpointError(f"{self.path}: cannot read tensor {name!r}: {error}") from error

    def _shard(self, name: str) -> Any:
        return self._shards[self._shard_of[name]]

    @cached_property
    def _shard_of(self) -> dict[str, str]:
        """File name by tensor name. Where there is an index, it alone says what belongs."""
        index_file = self.path / INDEX_FILE
        if index_file.is_file():
            weight_map = _read_json(index_file).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index_file} has no weight_map")
            if not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{index_file}: its weight_map must name a file each")
            return weight_map
        return dict.fromkeys(_open(self.path / self._only_file()).keys(), self._only_file())

    def _only_file(self) -> str:
        if (self.path / _SINGLE_FILE).is_file():
            return _SINGLE_FILE
        files = sorted(file.name for file in self.path.glob("*.safetensors"))
        if len(files) == 1:
            return files[0]
        if not files:
            raise CheckpointError(f"{self.path} has no safetensors file with the weights")
        raise CheckpointError(
            f"{self.path} has {len(files)} safetensors files and no {INDEX_FILE} to tell which"
            f" tensors belong: {', '.join(files)}"
        )

    @cached_property
    def _shards(self) -> dict[str, Any]:
        """The open files, each with every tensor that the index places in it."""
        files = sorted(set(self._shard_of.values()))
        missing = [file for file in files if not (self.path / file).is_file()]
        if missing:
            raise CheckpointError(f"{self.path} lacks the weight file {', '.join(missing)}")
        shards = {file: _open(self.path / file) for file in files}
        present = {file: set(shard.keys()) for file, shard in shards.items()}
        for name, file in self._shard_of.items():
            if name not in present[file]:
                raise CheckpointError(
                    f"{self.path / file} lacks the tensor {name!r} that {INDEX_FILE} places there"
                )
        return shards


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content

"""Finds the files of a model by path or name."""

import json
import os
import re
from pathlib import Path

from jaxpaged.checkpoint.gguf import GgufCheckpoint
from jaxpaged.checkpoint.protocol import Checkpoint
from jaxpaged.checkpoint.safetensors import CONFIG_FILE, INDEX_FILE, SafetensorsCheckpoint
from jaxpaged.config import LoadFormat
from jaxpaged.errors import ModelNotFoundError

# Name -> file in the folder of fetched models.
BUNDLED_MODELS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def home_folder() -> Path:
    """What jaxpaged keeps between runs lies here: $JAXPAGED_HOME, else in the user's cache."""
    home = os.environ.get("JAXPAGED_HOME")
    return Path(home) if home else Path.home() / ".cache" / "jaxpaged"


def models_folder() -> Path:
    """Where scripts/fetch_model puts models."""
    return home_folder() / "models"


def locate(model: str, load_format: LoadFormat = "auto") -> Checkpoint:
    """The first that exists: a folder, a `.gguf` file, a bundled name, a hub id.

    Args:
      model: path or name. Only what has the form owner/name is asked of the hub.
      load_format: "random" needs config.json only, and fetches nothing else from the hub.

    Raises:
      ModelNotFoundError: no such model, or none without a network.
      CheckpointError: its files are damaged. Weights are checked when they are first used.
    """
    if not model:
        raise ModelNotFoundError("model must not be empty: give a path or a name")
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not readable, of a user who is not here
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFoundError(f"no model {model!r}: {reason}") from error
    if is_folder:
        return SafetensorsCheckpoint(path, path.resolve().name)
    if is_file:
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a model folder nor a .gguf file")
        return GgufCheckpoint(path, path.stem)
    if model in BUNDLED_MODELS:
        return _bundled(model)
    if not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        names = ", ".join(BUNDLED_MODELS)
        raise ModelNotFoundError(
            f"no model {model!r}: no such folder or file, not a bundled name ({names}),"
            " and not a hub id (owner/name)"
        )
    folder = _hub_folder(model, [CONFIG_FILE] if load_format == "random" else _HUB_FILES)
    return SafetensorsCheckpoint(folder, model)


def _bundled(name: str) -> GgufCheckpoint:
    file = models_folder() / BUNDLED_MODELS[name]
    if not file.is_file():
        raise ModelNotFoundError(f"model {name!r} is not at {file}: run scripts/fetch_model first")
    return GgufCheckpoint(file, name)


def _hub_folder(model: str, patterns: list[str]) -> Path:
    """The hub's copy in the local cache when it is whole, else a download."""
    # why: only a hub id needs it, and it takes a while to import
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
        if _is_whole(cached, patterns):
            return cached
    except LocalEntryNotFoundError:
        pass  # not in the cache: ask the hub
    except HFValidationError as error:
        raise ModelNotFoundError(f"no model {model!r}: not a valid hub id: {error}") from error
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"no model {model!r}: no such folder or file, and not found on the hub: {reason}"
        ) from error


def _is_whole(folder: Path, patterns: list[str]) -> bool:
    """Whether an earlier, perhaps narrower or broken download fetched what is needed now."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    if patterns == [CONFIG_FILE]:
        return True
    index_file = folder / INDEX_FILE
    if not index_file.is_file():
        return any(folder.glob("*.safetensors"))
    shards = set(json.loads(index_file.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / shard).is_file() for shard in shards)

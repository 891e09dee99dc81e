"""From a path or a name to a checkpoint, or to an error that says what would help."""

from pathlib import Path

import huggingface_hub
import pytest
from helpers.tiny_gguf import write_gguf
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxpaged.checkpoint import locate
from jaxpaged.errors import CheckpointError, ModelNotFoundError

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_bundled_name_that_was_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="run scripts/fetch_model"):
        locate("smollm2")


def test_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    file = write_gguf(tmp_path / "models" / SMOLLM2_FILE)
    checkpoint = locate("smollm2")
    assert (checkpoint.name, checkpoint.path) == ("smollm2", file)


def test_a_gguf_file_is_named_after_itself(tmp_path: Path):
    assert locate(str(write_gguf(tmp_path / "tiny.gguf"))).name == "tiny"


@pytest.mark.parametrize("model", ["./x", "/nowhere/x", "x.gguf", "a/b.gguf", "a/b/c", "x"])
def test_paths_and_bare_names_never_reach_the_hub(model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError, match="no such folder or file"):
        locate(model)


def test_no_model_and_other_files(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match="must not be empty"):
        locate("")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelNotFoundError, match=r"neither a model folder nor a \.gguf file"):
        locate(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    ("model", "reason"), [("~no-such-user/x", "home directory"), ("x" * 300, "name too long")]
)
def test_paths_that_cannot_be(model: str, reason: str):
    with pytest.raises(ModelNotFoundError, match=f"no model '{model}': .*{reason}"):
        locate(model)


def test_a_config_that_is_nested_too_deeply(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is nested too deeply"):
        locate(str(tmp_path))


def test_a_hub_id_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch):
    def download(model: str, **options: object) -> str:
        raise LocalEntryNotFoundError("no network\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"not found on the hub: no network$"):
        locate("owner/model")


def test_a_hub_id_is_taken_from_the_cache_only_when_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text("{}")
    calls = []

    def download(model: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        calls.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/model", load_format="random").name == "owner/model"
    assert calls == [True]
    locate("owner/model")  # the cache has no weights: ask the hub
    assert calls == [True, True, False]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}}')
    (tmp_path / "s1.safetensors").write_bytes(b"")
    locate("owner/model")  # the cache lacks a shard
    (tmp_path / "s2.safetensors").write_bytes(b"")
    locate("owner/model")
    assert calls == [True, True, False, True, False, True]

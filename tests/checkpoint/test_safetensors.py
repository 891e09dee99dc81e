"""Folders in Hugging Face form, whole and broken."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.checkpoint import eos_token_ids, locate
from jaxpaged.errors import CheckpointError, ModelNotFoundError

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.linspace(-1, 1, 4).astype(ml_dtypes.bfloat16)
GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "some-model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "eos_token_id": [7, 8]}')
    return path


def write_shards(folder: Path, weight_map: dict[str, str]) -> None:
    save_file({"a": A, "stray": A}, folder / "model-1.safetensors")
    save_file({"b": B}, folder / "model-2.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SHARDS = {"a": "model-1.safetensors", "b": "model-2.safetensors"}


def test_single_file_keeps_dtypes(folder: Path):
    save_file({"a": A, "b": B}, folder / "model.safetensors")
    checkpoint = locate(str(folder))
    assert checkpoint.name == "some-model"
    assert checkpoint.path == folder
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config == {}
    assert checkpoint.shapes() == {"a": (2, 3), "b": (4,)}
    np.testing.assert_array_equal(checkpoint.tensor("a"), A)
    assert checkpoint.tensor("b").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(checkpoint.tensor("b"), B)


def test_bfloat16_needs_nothing_imported_before(folder: Path):
    save_file({"b": B}, folder / "model.safetensors")
    code = (
        "import sys; from jaxpaged.checkpoint import locate; print(locate(sys.argv[1]).tensor('b'))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str(B), result.stderr


def test_a_single_file_may_have_any_name(folder: Path):
    save_file({"a": A}, folder / "weights.safetensors")
    assert locate(str(folder)).shapes() == {"a": (2, 3)}


def test_the_index_says_what_belongs(folder: Path):
    write_shards(folder, SHARDS)
    save_file({"other": A}, folder / "consolidated.safetensors")
    checkpoint = locate(str(folder))
    assert checkpoint.shapes() == {"a": (2, 3), "b": (4,)}  # neither "stray" nor "other"
    np.testing.assert_array_equal(checkpoint.tensor("a"), A)
    with pytest.raises(CheckpointError, match="no tensor 'stray'"):
        checkpoint.tensor("stray")


def test_a_missing_shard_is_named(folder: Path):
    write_shards(folder, SHARDS)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the weight file model-2\.safetensors"):
        locate(str(folder)).shapes()


def test_a_tensor_missing_from_its_shard_is_named(folder: Path):
    write_shards(folder, SHARDS | {"c": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors lacks the tensor 'c'"):
        locate(str(folder)).tensor("a")


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_a_truncated_file_is_one_clear_line(folder: Path, length: int):
    file = folder / "model.safetensors"
    save_file({"a": A}, file)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safe") as error:
        locate(str(folder)).shapes()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", [5, None, ["model-1.safetensors"]])
def test_an_index_that_names_no_file_is_one_clear_line(folder: Path, file):
    write_shards(folder, SHARDS | {"b": file})
    with pytest.raises(CheckpointError, match=r"index\.json: its weight_map must name a file each"):
        locate(str(folder)).shapes()


def test_several_files_without_an_index_are_refused(folder: Path):
    save_file({"a": A}, folder / "x.safetensors")
    save_file({"b": B}, folder / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no .*index"):
        locate(str(folder)).shapes()


def test_a_folder_without_weights_serves_random_ones_only(folder: Path):
    checkpoint = locate(str(folder), load_format="random")
    assert checkpoint.config["eos_token_id"] == [7, 8]
    with pytest.raises(CheckpointError, match="no safetensors file"):
        checkpoint.shapes()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_is_named(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        locate(str(folder))


def test_a_folder_without_config_is_no_model(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        locate(str(tmp_path))


def test_eos_ids_are_a_union():
    ids = eos_token_ids({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, {}, {"eos_token_id": None})
    assert ids == {1, 2, 3}


@pytest.mark.parametrize("value", [1.5, "2", [2, "x"], [True], {"a": 1}])
def test_eos_ids_that_are_none_are_named(value):
    with pytest.raises(CheckpointError, match=r"eos_token_id=.* must be a token id or a list"):
        eos_token_ids({"eos_token_id": 1}, {"eos_token_id": value})


def test_golden_models_are_readable():
    checkpoint = locate(str(GOLDENS / "tiny_qwen3"))
    shapes = checkpoint.shapes()
    assert shapes["model.layers.2.self_attn.q_norm.weight"] == (32,)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4 * 32, 64)
    assert checkpoint.generation_config["eos_token_id"] == 2

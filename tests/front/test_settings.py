"""Models and settings: what cannot be loaded or run is refused; the model's defaults are used."""

import json
import shutil
from pathlib import Path

import pytest

from jaxpaged import LLM
from jaxpaged.errors import CheckpointError, InvalidFieldError, ModelNotFoundError
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults

GOLDENS = Path(__file__).parents[1] / "goldens"
NAN = float("nan")


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "tiny_qwen3", folder)
    return folder


def test_unknown_models():
    with pytest.raises(ModelNotFoundError, match="no model 'nowhere': no such folder or file"):
        LLM("nowhere")
    with pytest.raises(ModelNotFoundError, match="must not be empty"):
        LLM("")


def test_options_that_there_are_not():
    with pytest.raises(TypeError, match="no option 'gpu_memory_utilization'"):
        LLM("smollm2", gpu_memory_utilization=0.5)


def test_damaged_models(model_folder):
    weights = model_folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 7, 1000, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            LLM(str(model_folder))
    weights.unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        LLM(str(model_folder))
    (model_folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        LLM(str(model_folder))
    (model_folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        LLM(str(model_folder))


def test_a_truncated_gguf_file(tmp_path):
    file = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16):
        file.write_bytes(content)
        with pytest.raises(CheckpointError):
            LLM(str(file))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"block_size": 0}, "block_size=0 must be an integer at least 1"),
        ({"num_blocks": 0}, "num_blocks=0 must be an integer at least 1"),
        ({"max_model_len": -1}, "max_model_len=-1 must be an integer at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be an integer at least 1"),
        ({"max_num_seqs": 8, "max_num_tokens": 4}, "max_num_tokens=4 must be an integer at least"),
        ({"memory_fraction": 0.0}, r"memory_fraction=0.0 must be in \(0, 1\]"),
        ({"memory_fraction": NAN}, r"memory_fraction=nan must be in \(0, 1\]"),
        ({"scheduling": "lifo"}, "scheduling='lifo' must be one of"),
        ({"load_format": "zip"}, "load_format='zip' must be one of"),
        ({"generation_config": "mine"}, "generation_config='mine' must be one of"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"attention_impl": "flash"}, "attention_impl='flash' must be one of"),
        ({"max_num_tokens": 4}, "max_num_tokens=4 must be at least max_num_seqs=8"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be an integer between"),
        ({"max_model_len": 100, "num_blocks": 5}, "lower max_model_len to 80"),
        ({"tensor_parallel": 999}, "tensor_parallel=999 must be between 1 and"),
        ({"num_blocks": 2**27}, "num_blocks=134217728 .* at most"),
    ],
)
def test_bad_settings(options, line):
    with pytest.raises(ValueError, match=line):
        LLM(str(GOLDENS / "tiny_qwen3"), **options)


def test_a_context_longer_than_the_model_was_made_for_is_said(caplog):
    with LLM(str(GOLDENS / "tiny_qwen3"), max_model_len=513, max_num_seqs=1, max_num_tokens=16):
        pass
    assert "max_model_len=513 is more than the 512" in caplog.text


@pytest.mark.parametrize(("dtype", "warns"), [("float16", True), ("bfloat16", False)])
def test_a_checkpoint_that_float16_may_not_hold_is_said(dtype, warns, caplog):
    options = {"max_num_seqs": 1, "max_num_tokens": 16, "num_blocks": 8}
    with LLM(str(GOLDENS / "tiny_qwen3"), dtype=dtype, **options) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(output.completions[0].token_ids) == 2
    assert ("no number above 65504, the checkpoint's float32 does" in caplog.text) == warns


# --- defaults of the model ---------------------------------------------------------------------


def test_defaults_of_the_generation_config():
    read = SamplingDefaults.from_generation_config
    assert read({}) == SamplingDefaults(1.0, 0, 1.0, 0.0)
    wishes = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "max_new_tokens": 3}
    assert read(wishes) == SamplingDefaults(0.6, 20, 0.95, 0.1)
    assert read(wishes | {"do_sample": False}).temperature == 0
    assert read({"top_p": None, "do_sample": True}) == SamplingDefaults()
    with pytest.raises(InvalidFieldError, match="top_p=0"):
        read({"top_p": 0})


def test_defaults_reach_a_request_and_can_be_turned_off(model_folder, caplog):
    wishes = {"do_sample": False, "eos_token_id": [2, 7], "min_new_tokens": 3}
    (model_folder / "generation_config.json").write_text(json.dumps(wishes))
    options = {"max_num_seqs": 1, "max_num_tokens": 16, "num_blocks": 100}
    with LLM(str(model_folder), **options) as llm:
        assert llm.info.default_temperature == 0
        assert llm.info.eos_token_ids == [2, 7]
        case = json.loads((GOLDENS / "tiny_qwen3.json").read_text())["cases"][1]
        prompt, tokens = case["prompt_token_ids"], case["output_token_ids"]
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=8), use_tqdm=False)
        assert output.completions[0].token_ids == tokens[:8]
    assert "min_new_tokens=3: not supported yet" in caplog.text
    with LLM(str(model_folder), generation_config="none", **options) as llm:
        assert llm.info.default_temperature == 1
        outputs = llm.generate([prompt] * 3, SamplingParams(max_tokens=8), use_tqdm=False)
        assert len({tuple(o.completions[0].token_ids) for o in outputs}) == 3, "B32"
        zero = SamplingParams(max_tokens=8, seed=0)
        outputs = llm.generate([prompt] * 3, zero, use_tqdm=False)
        assert len({tuple(o.completions[0].token_ids) for o in outputs}) == 1

"""Makes the files in tests/goldens: what Hugging Face transformers answers, greedily, in float32.

Needs PyTorch, which jaxpaged itself never does, so it runs in an environment of its own:

    python3 -m venv torch-env
    torch-env/bin/pip install torch transformers gguf safetensors
    models=~/.cache/jaxpaged/models
    torch-env/bin/python scripts/make_goldens.py --gguf $models/SmolLM2-135M-Instruct.Q4_1.gguf

It imports nothing of jaxpaged: reading, dequantising and un-permuting the GGUF file are written a
second time here, so that a mistake in jaxpaged's own reader shows as other tokens.

Every golden file holds `cases`, each with
  prompt_token_ids, output_token_ids: greedy, end-of-sequence ids are ordinary tokens (ignore_eos);
  margins: per output token, how far the best logit was above the second best. Another
    implementation may differ where the margin is below 1e-3, and from there on.
Tiny random models come as Hugging Face folders; `<name>_logits.npz` beside them has the logits of
every prompt position, one array `case_<i>` of float32[num_tokens, vocab_size] a case.
"""

# pyright: reportMissingImports=false

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
NUM_OUTPUT_TOKENS = 32
# Around multiples of the block size 16, and of a chunk of 32 or 256 tokens.
SMOLLM2_LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100, 127, 128, 129]
SMOLLM2_LENGTHS += [255, 256, 257, 400, 512, 600]
TINY_LENGTHS = [1, 5, 15, 16, 17, 31, 32, 33, 40, 100]
TINY_LOGITS_LENGTHS = [1, 17, 100]
TINY_VOCAB_SIZE = 300

TEXT = """A paged key-value cache keeps the memory of a language model in blocks of equal size.
The idea is old: an operating system gives each process a table that maps the pages it sees to the
frames that exist, and nobody has to find one long free stretch. In the same way, every sequence
has a table of block numbers. When a block is full, the next one may lie anywhere. Two sequences
that begin with the same words can point at the same blocks, and only when one of them wants to
write into a shared block does it get a copy of its own.

Question: a train leaves Busan at 9:15 and arrives in Seoul at 11:52. How long does the ride take?
Answer: two hours and thirty-seven minutes.

def fibonacci(n: int) -> list[int]:
    values = [0, 1]
    while len(values) < n:
        values.append(values[-1] + values[-2])
    return values[:n]

Dear Ms. Alvarez, thank you for your letter of the third of May. We have looked at the drawings of
the bridge and agree with almost everything in them. The northern pier should stand a little
further from the road, because the ground is soft there, and the railing ought to be higher than
one metre. Please tell us whether the price changes. With kind regards, the council of the town.

안녕하세요 반갑습니다. 오늘은 날씨가 아주 좋네요. Grüße aus Köln! ¿Dónde está la biblioteca? 😀🚀

Water boils at a lower temperature on a mountain, since the air above it weighs less. A cook in
the Andes therefore lets potatoes boil longer. Salt changes this hardly at all, whatever people
say; a spoonful in a pot raises the boiling point by a fraction of a degree. What does help is a
lid that closes well and keeps the steam inside.
"""
SHORT_TEXTS = ["The capital of France is", "안녕하세요 반갑습니다", "1, 1, 2, 3, 5, 8,"]


def load_smollm2(path: Path) -> LlamaForCausalLM:
    """SmolLM2-135M from its GGUF file, every tensor dequantised to float32."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    model.set_attn_implementation("eager")
    model = model.float().eval()
    state = {"lm_head.weight": None}
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = values
        elif tensor.name == "output_norm.weight":
            state["model.norm.weight"] = values
        else:
            _, layer, part, _ = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):
                values = interleaved_to_halves(values, head_dim=64)
            state[f"model.layers.{layer}.{parts[part]}.weight"] = values
    model.load_state_dict(state, strict=True)
    return model


def interleaved_to_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of a head from the order of GGUF (0, half, 1, half + 1, ...) to 0, 1, 2, ..."""
    rows = torch.arange(weight.shape[0]).view(-1, head_dim)
    order = torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1).flatten()
    return weight[order]


def make_tiny_models() -> dict[str, PreTrainedModel]:
    """Small random models, each with what the big one lacks; see the options."""
    shared: dict[str, Any] = dict(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    torch.manual_seed(0)
    models = {
        "tiny_llama": LlamaForCausalLM(
            LlamaConfig(
                **shared,
                rope_parameters=llama3_rope,
                attention_bias=True,
                tie_word_embeddings=False,
            )
        ),
        "tiny_qwen2": Qwen2ForCausalLM(
            Qwen2Config(**shared, rope_parameters=rope, tie_word_embeddings=True)
        ),
        "tiny_qwen3": Qwen3ForCausalLM(
            Qwen3Config(**shared, head_dim=32, rope_parameters=rope, tie_word_embeddings=False)
        ),
    }
    for model in models.values():
        randomise(model.float().eval())
    return models


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Weights so large that every part of a layer moves the logits and outputs do not repeat."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif name.endswith("bias") or "embed_tokens" in name:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)


@torch.no_grad()
def greedy_case(model: PreTrainedModel, prompt: list[int]) -> tuple[dict, np.ndarray]:
    """The golden case of one prompt, and the logits of its positions."""
    output, margins = [], []
    answer = model(torch.tensor([prompt]), use_cache=True)
    prompt_logits = answer.logits[0].numpy()
    for _ in range(NUM_OUTPUT_TOKENS):
        best = torch.topk(answer.logits[0, -1], 2)
        output.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        answer = model(
            torch.tensor([output[-1:]]), past_key_values=answer.past_key_values, use_cache=True
        )
    case = {"prompt_token_ids": prompt, "output_token_ids": output, "margins": margins}
    return case, prompt_logits


def smollm2_prompts(path: Path) -> list[list[int]]:
    """Slices of a text, at other places each, and the short texts whole."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    tokens = encode(TEXT + TEXT)
    rng = random.Random(0)
    starts = [rng.randrange(len(tokens) - length + 1) for length in SMOLLM2_LENGTHS]
    slices = [tokens[i : i + n] for i, n in zip(starts, SMOLLM2_LENGTHS, strict=True)]
    return [encode(text) for text in SHORT_TEXTS] + slices


def write_json(name: str, model: str, cases: list[dict]) -> None:
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    head = json.dumps({"model": model, "ignore_eos": True})[:-1]
    (GOLDENS / f"{name}.json").write_text(f'{head}, "cases": [\n{lines}\n]}}\n')
    distinct = [len(set(case["output_token_ids"])) for case in cases]
    print(f"{name}: {len(cases)} cases, distinct output tokens a case: {distinct}")


def make_smollm2(path: Path) -> None:
    model = load_smollm2(path)
    cases = [greedy_case(model, prompt)[0] for prompt in smollm2_prompts(path)]
    write_json("smollm2", path.name, cases)


def make_tiny(name: str, model: PreTrainedModel) -> None:
    folder = GOLDENS / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    rng = random.Random(name)
    cases, logits = [], {}
    for i, length in enumerate(TINY_LENGTHS):
        prompt = [rng.randrange(3, TINY_VOCAB_SIZE) for _ in range(length)]
        case, prompt_logits = greedy_case(model, prompt)
        cases.append(case)
        if length in TINY_LOGITS_LENGTHS:
            logits[f"case_{i}"] = prompt_logits
    write_json(name, name, cases)
    np.savez_compressed(GOLDENS / f"{name}_logits.npz", **logits)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the files in tests/goldens.")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; without it, only tiny models")
    options = parser.parse_args()
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for name, model in make_tiny_models().items():
        make_tiny(name, model)
    if options.gguf:
        make_smollm2(options.gguf)


if __name__ == "__main__":
    main()

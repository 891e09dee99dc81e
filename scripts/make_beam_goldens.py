"""Makes tests/goldens/*_beams.json: what Hugging Face's beam search answers, in float32.

Runs in the environment of make_goldens.py, whose tiny models must be there already:

    torch-env/bin/python scripts/make_beam_goldens.py --gguf $models/SmolLM2-135M-Instruct.Q4_1.gguf

Every file holds `cases`, each with
  prompt_token_ids, beam_width, length_penalty, max_tokens;
  end_token_ids: the only ids that end a hypothesis; the model's own end ids are ordinary tokens;
  hypotheses: beam_width of them, best first, each with token_ids (the end token is one of them)
    and score = cumulative log-probability / number of tokens ** length_penalty.
`toy_beams.json` holds the toy model too: `logits[a][b]` are the next token's after tokens a, b.

Cases that hang on a difference too small for another implementation to repeat are left out: every
choice that a search made was made by more than MIN_MARGIN, so that tests may demand equal tokens.
"""

# pyright: reportMissingImports=false

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from make_goldens import GOLDENS, TINY_VOCAB_SIZE, load_smollm2, smollm2_prompts
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

MIN_MARGIN = 1e-3
# Short texts, and slices of 17 and 49 tokens.
SMOLLM2_PROMPTS = [0, 1, 2, 8, 14]
TINY_MODEL = "tiny_qwen3"
TINY_LENGTHS = [1, 5, 15, 16, 17, 33]
# beam_width, length_penalty, max_tokens, number of end ids; a prompt takes these in turn.
SMOLLM2_SEARCHES = [(2, 1.0, 20, 1), (4, 1.0, 16, 2), (4, 0.0, 16, 2), (4, 2.0, 12, 3)]
WIDE_SEARCH = (10, 1.0, 12, 2)
TINY_SEARCHES = [(2, 1.0, 20, 0), (3, 0.0, 20, 2), (4, 1.0, 20, 3), (4, 2.0, 20, 2)]
TINY_SEARCHES += [(2, -1.0, 20, 3), (10, 1.0, 20, 4)]
TOY_VOCAB_SIZE = 7
TOY_ENDS = [[], [0], [0, 3], [1, 2, 4]]
TOY_PENALTIES = [0.0, 0.5, 1.0, 2.0, -1.0]


@dataclass(frozen=True)
class Search:
    prompt_token_ids: list[int]
    beam_width: int
    length_penalty: float
    max_tokens: int
    end_token_ids: list[int]


class Recorder(LogitsProcessor):
    """Keeps the log-probabilities that a search saw: generated tokens -> those of the next one."""

    def __init__(self, num_prompt_tokens: int):
        self.num_prompt_tokens = num_prompt_tokens
        self.logprobs: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for tokens, row in zip(input_ids.tolist(), scores.double().numpy(), strict=True):
            self.logprobs[tuple(tokens[self.num_prompt_tokens :])] = row
        return scores


@torch.no_grad()
def run(model: PreTrainedModel, search: Search) -> tuple[list[dict], float]:
    """Its hypotheses, and the margin of its closest choice."""
    recorder = Recorder(len(search.prompt_token_ids))
    config = GenerationConfig(
        num_beams=search.beam_width,
        num_return_sequences=search.beam_width,
        length_penalty=search.length_penalty,
        max_new_tokens=search.max_tokens,
        eos_token_id=search.end_token_ids or None,
        pad_token_id=0,
        do_sample=False,
        early_stopping=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    prompt = torch.tensor([search.prompt_token_ids])
    answer = model.generate(prompt, generation_config=config, logits_processor=[recorder])
    hypotheses = []
    for tokens, score in zip(answer.sequences.tolist(), answer.sequences_scores, strict=True):
        generated = tokens[len(search.prompt_token_ids) :][: search.max_tokens]
        ends = [i for i, token in enumerate(generated) if token in search.end_token_ids]
        token_ids = generated[: ends[0] + 1] if ends else generated
        hypotheses.append({"token_ids": token_ids, "score": round(float(score), 5)})
    return hypotheses, margin_of(search, recorder.logprobs, hypotheses)


def margin_of(search: Search, logprobs: dict, hypotheses: list[dict]) -> float:
    """Repeats a search from what it saw, and tells by how little a choice in it was made.

    The margins of scores are in log-probability: what would have to change to turn them.
    """
    width, ends = search.beam_width, search.end_token_ids
    beams, done, margin = [(0.0, ())], [], math.inf

    def rated(total: float, tokens: tuple) -> tuple[float, float, tuple]:
        weight = len(tokens) ** -search.length_penalty
        return total * weight, weight, tokens

    def gap(better: tuple, worse: tuple) -> float:
        return (better[0] - worse[0]) / max(better[1], worse[1])

    for length in range(1, search.max_tokens + 1):
        offers = []
        for total, tokens in beams:
            row = logprobs[tokens]
            best = np.argsort(-row)[: width + len(ends) + 1]
            offers += [(total + row[i], (*tokens, int(i))) for i in best]
        offers.sort(reverse=True)
        is_last = length == search.max_tokens
        ended = [is_last or tokens[-1] in ends for _, tokens in offers]
        if any(ended[width - 1 : width + 1]) and len(offers) > width:
            margin = min(margin, offers[width - 1][0] - offers[width][0])
        done += [rated(*offers[i]) for i in range(min(width, len(offers))) if ended[i]]
        done.sort(reverse=True)
        growing = [offer for offer, end in zip(offers, ended, strict=True) if not end]
        if is_last:
            break
        if len(growing) > width:
            margin = min(margin, growing[width - 1][0] - growing[width][0])
        beams = growing[:width]
        if len(done) >= width:
            improvement = gap(rated(*beams[0]), done[width - 1])
            margin = min(margin, abs(improvement))
            if improvement <= 0:
                break
    assert [list(tokens) for *_, tokens in done[:width]] == [h["token_ids"] for h in hypotheses]
    kept = done[: width + 1]
    return min([margin] + [gap(a, b) for a, b in pairwise(kept)])


def with_ends(model: PreTrainedModel, search: Search, num_ends: int) -> Search:
    """The search, ended by tokens that it says when nothing ends it."""
    hypotheses, _ = run(model, search)
    said = [h["token_ids"][4 * i + 3] for i, h in enumerate(2 * hypotheses) if i < num_ends]
    return replace(search, end_token_ids=sorted(set(said)))


def cases_of(model: PreTrainedModel, searches: list[Search]) -> list[dict]:
    cases = []
    for search in searches:
        hypotheses, margin = run(model, search)
        if margin > MIN_MARGIN:
            cases.append(asdict(search) | {"hypotheses": hypotheses})
    return cases


def write_json(name: str, head: dict, cases: list[dict]) -> None:
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    text = json.dumps(head, separators=(",", ":"))[:-1]
    (GOLDENS / f"{name}_beams.json").write_text(f'{text},"cases":[\n{lines}\n]}}\n')
    early = sum(
        len(h["token_ids"]) < case["max_tokens"] for case in cases for h in case["hypotheses"]
    )
    print(f"{name}: {len(cases)} cases, {early} hypotheses ended before max_tokens")


def make_model(name: str, head: str, model: PreTrainedModel, asked: list[tuple]) -> None:
    """`asked`: prompt, beam_width, length_penalty, max_tokens, number of end ids."""
    model.generation_config = GenerationConfig()
    searches = [with_ends(model, Search(*options, []), num_ends) for *options, num_ends in asked]
    write_json(name, {"model": head}, cases_of(model, searches))


def make_smollm2(path: Path) -> None:
    prompts = [smollm2_prompts(path)[i] for i in SMOLLM2_PROMPTS]
    asked = [
        (prompt, *SMOLLM2_SEARCHES[(2 * i + k) % len(SMOLLM2_SEARCHES)])
        for i, prompt in enumerate(prompts)
        for k in range(2)
    ]
    make_model("smollm2", path.name, load_smollm2(path), [*asked, (prompts[0], *WIDE_SEARCH)])


def make_tiny() -> None:
    rng = random.Random(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        GOLDENS / TINY_MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    asked = [
        ([rng.randrange(3, TINY_VOCAB_SIZE) for _ in range(length)], *search)
        for i, length in enumerate(TINY_LENGTHS)
        for search in (TINY_SEARCHES[i], TINY_SEARCHES[(i + 2) % len(TINY_SEARCHES)])
    ]
    make_model(TINY_MODEL, TINY_MODEL, model.eval(), asked)


class ToyModel(PreTrainedModel, GenerationMixin):
    """A table: the last two tokens alone decide about the next one."""

    config_class = PreTrainedConfig

    def __init__(self, logits: torch.Tensor):
        super().__init__(PreTrainedConfig(vocab_size=TOY_VOCAB_SIZE, use_cache=False))
        self.table = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, **_) -> CausalLMOutput:
        before = torch.roll(input_ids, 1, dims=1)
        return CausalLMOutput(logits=self.table[before, input_ids])


def make_toy() -> None:
    rng = random.Random(0)
    size = range(TOY_VOCAB_SIZE)
    logits = [[[round(rng.gauss(0, 1.2), 3) for _ in size] for _ in size] for _ in size]
    model = ToyModel(torch.tensor(logits))
    model.generation_config = GenerationConfig(use_cache=False)
    searches = [
        Search([rng.randrange(7), rng.randrange(7)], width, penalty, rng.randrange(4, 11), ends)
        for width in (2, 3, 5)
        for penalty in TOY_PENALTIES
        for ends in TOY_ENDS
    ]
    write_json("toy", {"logits": logits}, cases_of(model, searches))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the beam searches of tests/goldens.")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; without it, only tiny models")
    options = parser.parse_args()
    make_toy()
    make_tiny()
    if options.gguf:
        make_smollm2(options.gguf)


if __name__ == "__main__":
    main()

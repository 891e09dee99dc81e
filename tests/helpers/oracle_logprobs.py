"""Log-probabilities of tiny_qwen3 from the plain NumPy model, and comparisons with them."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from helpers.numpy_model import numpy_logits
from safetensors.numpy import load_file

from jaxpaged.logprobs import PositionLogprobs, TokenLogprob

MODEL = "tiny_qwen3"
# Float32 against float64, which are apart by 1.4e-5.
TOLERANCE = 1e-4


@cache
def _config_and_tensors():
    folder = Path(__file__).parents[1] / "goldens" / MODEL
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


@cache
def _logits(token_ids: tuple[int, ...]) -> np.ndarray:
    return numpy_logits(*_config_and_tensors(), token_ids)


def oracle_logits(token_ids: Sequence[int]) -> np.ndarray:
    """[position, id]: what the model thinks of the token behind each position."""
    return _logits(tuple(token_ids))


def oracle_logprobs(token_ids: Sequence[int]) -> np.ndarray:
    """The log-softmax of `oracle_logits`."""
    logits = oracle_logits(token_ids)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check_position(position: PositionLogprobs, row: np.ndarray, token_id: int, k: int) -> None:
    """One position's k best and chosen token against the oracle's row for it."""
    assert position.chosen is not None and position.chosen.token_id == token_id
    check_entry(position.chosen, row)
    assert len(position.top) == min(k, len(row))
    for rank, entry in enumerate(position.top, 1):
        assert entry.rank == rank
        check_entry(entry, row)
    assert len({entry.token_id for entry in position.top}) == len(position.top)
    entries = position.entries
    assert len(entries) == k + (position.chosen.rank > k)
    assert [entry.rank for entry in entries] == sorted(entry.rank for entry in entries)
    logprobs = [entry.logprob for entry in entries]
    assert logprobs == sorted(logprobs, reverse=True)
    assert position.chosen in entries


def check_entry(entry: TokenLogprob, row: np.ndarray) -> None:
    """One entry's value, and its rank as far as the tolerance lets it be told."""
    value = row[entry.token_id]
    assert abs(entry.logprob - value) < TOLERANCE, f"{entry} is {value}"
    surely_better = (row > value + 2 * TOLERANCE).sum()
    maybe_better = (row >= value - 2 * TOLERANCE).sum()
    assert surely_better < entry.rank <= maybe_better, f"{entry}: {surely_better} are better"


def check_prompt(positions: Sequence[PositionLogprobs], prompt: Sequence[int], k: int) -> None:
    """One entry a prompt token, the first of them empty."""
    assert len(positions) == len(prompt)
    assert positions[0] == PositionLogprobs(None, [])
    rows = oracle_logprobs(prompt)
    for i, position in enumerate(positions[1:], 1):
        check_position(position, rows[i - 1], prompt[i], k)


def check_output(
    positions: Sequence[PositionLogprobs], prompt: Sequence[int], output: Sequence[int], k: int
) -> None:
    """One entry an output token."""
    assert len(positions) == len(output)
    rows = oracle_logprobs([*prompt, *output])
    for i, position in enumerate(positions):
        check_position(position, rows[len(prompt) + i - 1], output[i], k)

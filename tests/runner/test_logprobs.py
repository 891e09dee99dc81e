"""Log-probabilities and ranks against a plain NumPy reference, on random logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_sampling import logprobs_of

from jaxpaged.logprobs import PositionLogprobs, num_words, unpack_logprobs
from jaxpaged.runner.logprobs import top_logprobs
from jaxpaged.sampling_params import MAX_LOGPROBS

VOCAB = 211
pack = jax.jit(top_logprobs)


def random_rows(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Smooth, with ties, with -inf, +-60, huge, tiny, all equal, zeros of both signs; 30 each."""
    smooth = rng.normal(0, 3, (30, vocab))
    holes = np.where(rng.random((30, vocab)) < 0.4, -np.inf, smooth)
    holes[:, 0] = smooth[:, 0]
    kinds = [
        smooth,
        rng.integers(-3, 4, (30, vocab)) * 0.75,
        holes,
        np.where(rng.random((30, vocab)) < 0.5, 60.0, -60.0),
        smooth * 1e30,
        smooth * 1e-30,
        np.full((30, vocab), 5.0),
        np.where(rng.random((30, vocab)) < 0.5, 0.0, -0.0),
        np.where(rng.random((30, vocab)) < 0.1, 3e38, -3e38),
    ]
    return np.concatenate(kinds).astype(np.float32)


def random_choices(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """Any id, the first, the last, the best, the worst."""
    count, vocab = rows.shape
    kinds = [
        rng.integers(vocab, size=count),
        np.zeros(count),
        np.full(count, vocab - 1),
        rows.argmax(axis=1),
        rows.argmin(axis=1),
    ]
    return np.choose(rng.integers(len(kinds), size=count), kinds).astype(np.int32)


def unpack(packed: np.ndarray, token_id: int, num_best: int) -> PositionLogprobs:
    """One packed row, cut to its best tokens, as a user reads it."""
    record = packed[: num_words(num_best)].tobytes()
    (position,) = unpack_logprobs(record, [token_id], lambda token_id: b"%d" % token_id)
    assert all(entry.token_bytes == b"%d" % entry.token_id for entry in position.entries)
    return position


def check(found: PositionLogprobs, row: np.ndarray, chosen: int, num_best: int) -> None:
    """Ids and ranks exactly; values within 4e-6, and 1e-6 of their size."""
    logprob, rank, ids, logprobs = logprobs_of(row, chosen, num_best)
    assert found.chosen is not None
    assert (found.chosen.token_id, found.chosen.rank) == (chosen, rank)
    assert [entry.token_id for entry in found.top] == ids
    assert [entry.rank for entry in found.top] == list(range(1, len(ids) + 1))
    with np.errstate(over="ignore"):
        want = np.array([logprob, *logprobs]).astype(np.float32)
    values = [found.chosen.logprob, *(entry.logprob for entry in found.top)]
    np.testing.assert_allclose(values, want, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("vocab", [1, 2, 12, MAX_LOGPROBS, MAX_LOGPROBS + 1, VOCAB])
def test_values_and_ranks_are_the_reference_s(vocab):
    rng = np.random.default_rng(vocab)
    rows = random_rows(rng, vocab)
    chosen = random_choices(rng, rows)
    packed = np.asarray(pack(jnp.asarray(rows), jnp.asarray(chosen)))
    for at, (row, token_id) in enumerate(zip(rows, chosen.tolist(), strict=True)):
        for num_best in {0, 1, at % (MAX_LOGPROBS + 1), MAX_LOGPROBS}:
            check(unpack(packed[at], token_id, num_best), row, token_id, num_best)


def test_entries_are_k_or_one_more_and_best_first():
    """B41: the chosen token is always there, once, with its rank."""
    rng = np.random.default_rng(5)
    rows = random_rows(rng, VOCAB)
    chosen = random_choices(rng, rows)
    packed = np.asarray(pack(jnp.asarray(rows), jnp.asarray(chosen)))
    lengths = set()
    for row, token_id in zip(packed, chosen.tolist(), strict=True):
        for k in (0, 1, 3):
            position = unpack(row, token_id, k)
            assert position.chosen is not None
            entries = position.entries
            lengths.add(len(entries) - k)
            assert len(entries) == k + (position.chosen.rank > k)
            ranks = [entry.rank for entry in entries]
            assert ranks == sorted(set(ranks))
            assert [e.rank for e in entries if e.token_id == token_id] == [position.chosen.rank]
            values = [entry.logprob for entry in entries]
            assert values == sorted(values, reverse=True)
    assert lengths == {0, 1}


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(6)
    rows = random_rows(rng, VOCAB)[::40]
    chosen = random_choices(rng, rows)
    together = np.asarray(pack(jnp.asarray(rows), jnp.asarray(chosen)))
    others = rows.copy()
    others[::2] = np.nan
    beside_nan = np.asarray(pack(jnp.asarray(others), jnp.asarray(chosen)))
    np.testing.assert_array_equal(together[1::2], beside_nan[1::2])


@pytest.mark.parametrize("change", ["value", "rank", "order", "length"])
def test_a_wrong_value_shows(change):
    row = np.random.default_rng(7).normal(0, 3, VOCAB).astype(np.float32)
    packed = np.asarray(pack(jnp.asarray(row[None]), jnp.asarray([17])))[0]
    check(unpack(packed, 17, 5), row, 17, 5)
    wrong = packed.copy()
    if change == "value":
        wrong[:1] = (wrong[:1].view(np.float32) + np.float32(1e-4)).view(np.int32)
    elif change == "rank":
        wrong[1] += 1
    elif change == "order":
        wrong[[2, 3]] = wrong[[3, 2]]
    with pytest.raises(AssertionError):
        check(unpack(wrong, 17, 4 if change == "length" else 5), row, 17, 5)


def test_reference_by_hand():
    logits = np.log(np.array([0.1, 0.4, 0.1, 0.4], np.float32)) + 7
    chosen, rank, ids, values = logprobs_of(logits, 2, 3)
    assert (rank, ids) == (4, [1, 3, 0])
    np.testing.assert_allclose([chosen, *values], np.log([0.1, 0.4, 0.4, 0.1]), rtol=1e-6)
    assert logprobs_of(np.array([-np.inf, 0.0]), 0, 9) == (-np.inf, 2, [1, 0], [0.0, -np.inf])

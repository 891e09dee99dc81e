"""What `look_before` and `find_limits` tell, against plain sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.runner.rejection import Before, draw_kept, find_limits, look_before, pad_vocab

WIDTHS = [97, 4096, 9000]


def random_gaps(rng: np.random.Generator, num_rows: int, vocab: int) -> np.ndarray:
    """Rows with few heavy tokens and many of 1e-3 to 1e-11; every fourth has many ties."""
    gaps = rng.uniform(7, 25, (num_rows, vocab))
    gaps[:, 5] = rng.uniform(0, 3, num_rows)
    gaps[::4] = np.round(gaps[::4])
    gaps[:, rng.integers(vocab)] = 0.0
    return gaps.astype(np.float32)


def look(gaps: np.ndarray, token_ids: np.ndarray) -> Before:
    padded = pad_vocab(jnp.asarray(gaps))
    bounds = gaps[np.arange(len(gaps)), token_ids].view(np.int32)
    return jax.jit(look_before)(padded, -padded, jnp.asarray(bounds), jnp.asarray(token_ids))


def are_before(gaps: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    bounds = gaps[np.arange(len(gaps)), token_ids][:, None]
    ids = np.arange(gaps.shape[1])
    return (gaps < bounds) | ((gaps == bounds) & (ids < token_ids[:, None]))


@pytest.mark.parametrize("vocab", WIDTHS)
def test_weight_count_and_noisiest_of_what_is_before(vocab):
    rng = np.random.default_rng(vocab)
    gaps = random_gaps(rng, 64, vocab)
    token_ids = rng.integers(0, vocab, 64, dtype=np.int32)
    is_before = are_before(gaps, token_ids)
    found = look(gaps, token_ids)
    weights = np.exp(-gaps.astype(np.float64))
    expected = np.where(is_before, weights, 0).sum(axis=1)
    np.testing.assert_allclose(found.weight, expected, rtol=1e-6)
    np.testing.assert_array_equal(found.count, is_before.sum(axis=1))
    some = is_before.any(axis=1)
    noisiest = np.where(is_before, -gaps, -np.inf).argmax(axis=1)
    np.testing.assert_array_equal(np.asarray(found.noisiest)[some], noisiest[some])
    without_light = np.where(is_before & (weights > 2.0**-20), weights, 0).sum(axis=1)
    assert not np.allclose(found.weight, without_light, rtol=1e-6), "the comparison cannot fail"


def test_weights_of_all_tokens_alike_do_not_overflow():
    """The largest sums: 2**18 tokens of weight 1, and of one just below 2**-20."""
    for gap in (0.0, 20 * np.log(2) + 1e-3):
        gaps = np.full((1, 2**18), gap, np.float32)
        gaps[0, 0] = 0.0
        found = look(gaps, np.array([2**18 - 1], np.int32))
        expected = 1 + (2**18 - 2) * np.exp(-np.float64(np.float32(gap)))
        np.testing.assert_allclose(found.weight, expected, rtol=1e-6)


def test_sums_are_the_same_in_any_batch():
    rng = np.random.default_rng(1)
    gaps = random_gaps(rng, 32, 5000)
    token_ids = rng.integers(0, 5000, 32, dtype=np.int32)
    together = np.asarray(look(gaps, token_ids).weight)
    for row in range(32):
        alone = look(gaps[row : row + 1], token_ids[row : row + 1]).weight
        np.testing.assert_array_equal(alone, together[row : row + 1])


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("top_k", [1, 2, 20, 96])
def test_top_p_is_a_part_of_the_k_best(vocab, top_k):
    gaps = random_gaps(np.random.default_rng(top_k), 64, vocab)
    gaps[0] = 0.0
    gaps[1] = np.inf
    gaps[1, 3] = 0.0
    padded = pad_vocab(jnp.asarray(gaps))
    ks, ps = np.full(64, top_k, np.int32), np.full(64, 0.5, np.float32)
    find = jax.jit(find_limits, static_argnames="has_both")
    limits, _ = find(padded, -padded, jnp.asarray(ks), jnp.asarray(ps), has_both=True)
    best = np.sort(gaps.astype(np.float64), axis=1)[:, :top_k]
    expected = 0.5 * np.exp(-best).sum(axis=1)
    np.testing.assert_allclose(limits.weight, expected, rtol=1e-6)
    np.testing.assert_array_equal(limits.count, ks)
    others, _ = find(padded, -padded, jnp.asarray(ks), jnp.asarray(ps), has_both=False)
    assert not np.allclose(others.weight, expected, rtol=1e-6), "the comparison cannot fail"


def test_a_row_that_takes_too_long_is_told_and_harms_no_other():
    """Noise that falls as logits rise: every round refuses one token alone."""
    vocab = 600
    gaps = jnp.broadcast_to(jnp.linspace(0, 1, vocab, dtype=jnp.float32), (3, vocab))
    noisy = gaps.at[1].set(-gaps[1])
    top_k, top_p = jnp.array([vocab - 100, 1, 1], jnp.int32), jnp.ones(3, jnp.float32)
    token_ids, is_found = draw_kept(gaps, noisy, top_k, top_p, has_both=False)
    np.testing.assert_array_equal(is_found, [True, True, False])
    np.testing.assert_array_equal(token_ids[:2], [vocab - 101, 0])

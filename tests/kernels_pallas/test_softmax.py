import jax.numpy as jnp
import numpy as np

from kernels_pallas import softmax

RNG = np.random.default_rng(0)
SCORES = jnp.asarray(RNG.standard_normal((3, 8)) * 4, jnp.float32)
VALUES = jnp.asarray(RNG.standard_normal((8, 5)), jnp.float32)
QUERIES = jnp.zeros((3, 5))
ALL = jnp.ones((3, 8), bool)


def dense(scores, values, sinks=None):
    scores, values = np.asarray(scores, np.float64), np.asarray(values, np.float64)
    weights = np.exp(scores)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
    return weights @ values / total[:, None]


def one_tile(scores=SCORES, visible=ALL, values=VALUES):
    return softmax.update(softmax.start(QUERIES), scores, visible, values)


def test_tiles_in_sequence_equal_dense():
    state = softmax.start(QUERIES)
    for begin in (0, 2, 4, 6):
        tile = slice(begin, begin + 2)
        state = softmax.update(state, SCORES[:, tile], ALL[:, tile], VALUES[tile])
    np.testing.assert_allclose(softmax.finish(state), dense(SCORES, VALUES), rtol=1e-5)


def test_merge_of_two_halves_equals_one_state():
    left = one_tile(SCORES[:, :3], ALL[:, :3], VALUES[:3])
    right = one_tile(SCORES[:, 3:], ALL[:, 3:], VALUES[3:])
    for state in (softmax.merge(left, right), softmax.merge(right, left)):
        np.testing.assert_allclose(softmax.finish(state), dense(SCORES, VALUES), rtol=1e-5)


def test_merge_with_an_empty_state_changes_nothing():
    state, empty = one_tile(), softmax.start(QUERIES)
    for merged in (softmax.merge(state, empty), softmax.merge(empty, state)):
        np.testing.assert_array_equal(softmax.finish(merged), softmax.finish(state))
    assert not np.asarray(softmax.finish(softmax.merge(empty, empty))).any()


def test_hidden_scores_may_be_nan():
    scores = SCORES.at[:, 5:].set(jnp.nan)
    state = one_tile(scores, jnp.isfinite(scores))
    np.testing.assert_allclose(softmax.finish(state), dense(SCORES[:, :5], VALUES[:5]), rtol=1e-5)


def test_a_row_without_keys_is_zero_and_then_starts_afresh():
    state = one_tile(visible=ALL.at[1].set(False))
    assert not np.asarray(softmax.finish(state))[1].any()
    state = softmax.update(state, SCORES, ALL, VALUES)
    np.testing.assert_allclose(
        np.asarray(softmax.finish(state))[1], dense(SCORES, VALUES)[1], rtol=1e-5
    )


def test_sinks_above_and_below_the_scores():
    sinks = jnp.asarray([-50.0, 1.0, 60.0], jnp.float32)
    out = softmax.finish(one_tile(), sinks)
    np.testing.assert_allclose(out, dense(SCORES, VALUES, sinks), rtol=1e-5)
    assert not np.asarray(softmax.finish(softmax.start(QUERIES), sinks)).any()

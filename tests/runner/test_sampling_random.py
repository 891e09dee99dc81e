"""Sampling options on many random rows at once, against the NumPy reference and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_sampling import kept_ids
from helpers.sampler import draw, draw_random, kept_mask, make_inputs

from jaxpaged.runner import sampling
from jaxpaged.runner.sampling import Variant

VOCAB = 97


def many_rows(rng, vocab=VOCAB):
    """320 rows: smooth, as bfloat16 has them, with ties, with -inf, +-60, steep, huge, tiny."""
    smooth = rng.normal(0, 2, (40, vocab))
    holes = np.where(rng.random((40, vocab)) < 0.4, -np.inf, 1.5 * smooth)
    holes[:, vocab // 2] = smooth[:, 0]
    kinds = [
        smooth,
        np.asarray(jnp.asarray(smooth, jnp.bfloat16).astype(jnp.float32)),
        rng.integers(-3, 3, (40, vocab)) * 0.75,
        holes,
        np.where(rng.random((40, vocab)) < 0.5, 60.0, -60.0),
        30 * smooth,
        1e30 * smooth,
        1e-30 * smooth,
    ]
    return np.concatenate(kinds).astype(np.float32)


def random_options(rng, count):
    """A value of each option for each row, off for a third of them."""
    values = {
        "temperature": [1.0, 1.0, 1e-30, 1e-7, 1e-4, 0.3, 1.0, 4.0, 100.0],
        "top_k": [0, 0, 0, 1, 2, 7, VOCAB - 1, VOCAB, 2**31 - 1],
        "top_p": [1.0, 1.0, 1.0, 1e-46, 1e-9, 0.3, 0.9, 0.999, 0.9999999],
        "min_p": [0.0, 0.0, 0.0, 1e-37, 1e-4, 0.05, 0.3, 0.9, 1.0],
    }
    return {name: rng.choice(choices, count) for name, choices in values.items()}


def test_random_rows_with_random_options_keep_what_the_reference_keeps():
    """Exactly, but where float32 cannot tell which side of min_p or top_p a token is on."""
    rng = np.random.default_rng(11)
    rows = many_rows(rng)
    options = random_options(rng, len(rows))
    inputs = make_inputs(len(rows), **options)
    kept = np.asarray(kept_mask(jnp.asarray(rows), inputs))
    tokens, is_finite = (np.asarray(x) for x in draw_random(jnp.asarray(rows), inputs))
    assert is_finite.all()
    num_exact = 0
    for at, row in enumerate(rows):
        one = {name: column[at].item() for name, column in options.items()}
        off = 1e-5
        least = kept_ids(
            row, **one | {"min_p": one["min_p"] * (1 + off), "top_p": one["top_p"] * (1 - off)}
        )
        most = kept_ids(
            row, **one | {"min_p": one["min_p"] * (1 - off), "top_p": one["top_p"] * (1 + off)}
        )
        found = set(np.flatnonzero(kept[at]))
        assert least <= found <= most and found, (at, one)
        assert tokens[at] in most and row[tokens[at]] > -np.inf, (at, one)
        num_exact += least == most
    assert num_exact > 200, "the comparison says little"


def test_a_row_gets_the_same_token_from_every_variant_that_does_for_it():
    rng = np.random.default_rng(12)
    rows = many_rows(rng)
    options = random_options(rng, len(rows))
    num_limits = (options["top_k"] > 0) * 1 + (options["top_p"] < 1)
    inputs = make_inputs(len(rows), **options)
    random, limited, both = (
        np.asarray(draw(jnp.asarray(rows), inputs, variant)[0])
        for variant in (Variant.RANDOM, Variant.LIMITED, Variant.LIMITED_BOTH)
    )
    np.testing.assert_array_equal(random[num_limits == 0], both[num_limits == 0])
    np.testing.assert_array_equal(limited[num_limits < 2], both[num_limits < 2])
    for most, tokens in enumerate((random, limited)):
        assert (num_limits == most).sum() >= 30, "the comparison says little"
        assert (tokens != both).any(), "the comparison cannot fail"


@pytest.mark.parametrize("is_partitionable", [True, False])
def test_wide_rows_get_the_same_token_from_every_variant(is_partitionable):
    """Limited variants pad such rows; a user may have set how JAX splits random bits."""
    with jax.threefry_partitionable(is_partitionable):
        rows = jnp.zeros((16, 5000), jnp.float32)
        inputs = make_inputs(16, seeds=np.arange(16))
        random, limited = (
            np.asarray(draw(rows, inputs, variant)[0])
            for variant in (Variant.RANDOM, Variant.LIMITED)
        )
    np.testing.assert_array_equal(random, limited)
    assert len(set(random)) > 8, "the comparison cannot fail"


def test_limits_that_keep_all_are_as_if_unset():
    """B26, on any logits: the same draws, bit for bit."""
    rng = np.random.default_rng(12)
    rows = jnp.asarray(many_rows(rng))
    num_rows = len(rows)
    finite = np.isfinite(np.asarray(rows)).sum(axis=1)
    unset = np.asarray(draw_random(rows, make_inputs(num_rows))[0])
    for options in (
        {"top_k": finite},
        {"top_k": 2**31 - 1},
        {"top_k": [0, VOCAB] * (num_rows // 2), "top_p": 1.0, "min_p": 0.0},
        # What is on for a neighbour is still off here.
        {"top_k": [0, 1] * (num_rows // 2), "top_p": [1.0, 0.5] * (num_rows // 2)},
    ):
        tokens = np.asarray(draw_random(rows, make_inputs(num_rows, **options))[0])
        np.testing.assert_array_equal(tokens[::2], unset[::2], err_msg=str(options))
    one = make_inputs(num_rows, top_k=1)
    assert not np.array_equal(draw_random(rows, one)[0], unset), "the comparison cannot fail"


@pytest.mark.parametrize("padding", [1, 31, VOCAB])
def test_padding_columns_change_no_draw(padding):
    rng = np.random.default_rng(13)
    rows = many_rows(rng)
    padded = np.pad(rows, ((0, 0), (0, padding)), constant_values=-np.inf)
    inputs = make_inputs(len(rows), **random_options(rng, len(rows)))
    for variant in Variant:
        np.testing.assert_array_equal(
            draw(jnp.asarray(rows), inputs, variant)[0],
            draw(jnp.asarray(padded), inputs, variant)[0],
        )


def test_logits_made_against_the_noise_do_not_leave_top_k():
    """Whoever knows the seed can make a row that takes more rounds than there are."""
    vocab = 600
    inputs = make_inputs(2, seeds=7, temperature=1e6, top_k=[5, 0])
    noise = np.asarray(sampling._noise(inputs, vocab))
    places = noise.argsort(axis=1).argsort(axis=1)  # the more noise, the later
    logits = jnp.asarray(-0.1 * places, jnp.float32)
    drawn, is_finite = draw(logits, inputs, Variant.LIMITED)
    assert places[0, drawn[0]] < 5 and is_finite.all()
    assert places[1, drawn[1]] > 500, "the noise was to draw the worst"


def test_one_token_left_is_the_lowest_of_the_best():
    """B28, B29: on any logits, with ties and -inf."""
    rows = many_rows(np.random.default_rng(14))
    greedy = rows.argmax(axis=1)
    ties = rows == rows.max(axis=1, keepdims=True)
    for options in (
        {"temperature": 0.0, "top_p": 0.5, "min_p": 0.5},
        {"top_k": 1, "temperature": 50.0},
        {"top_k": 1, "top_p": 0.1, "min_p": 1.0},
        {"top_p": 1e-9},
        {"top_k": 1, "temperature": 1e-30},
    ):
        tokens = np.asarray(draw_random(jnp.asarray(rows), make_inputs(len(rows), **options))[0])
        np.testing.assert_array_equal(tokens, greedy, err_msg=str(options))
    for options in ({"temperature": 1e-37}, {"temperature": 1e-37, "top_p": 0.9}, {"min_p": 1.0}):
        tokens = np.asarray(draw_random(jnp.asarray(rows), make_inputs(len(rows), **options))[0])
        is_tiny = (rows.max(axis=1) - rows.min(axis=1)) < 1e-20
        assert (ties[np.arange(len(rows)), tokens] | is_tiny).all(), options
    assert (ties.sum(axis=1) > 1).any()

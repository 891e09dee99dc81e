"""Sampling against a plain NumPy reference: kept sets exactly, draws as frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_sampling import expected_distribution, kept_ids
from helpers.sampler import draw, draw_random, kept_mask, make_inputs

from jaxpaged.runner.sampling import Variant

VOCAB = 97
OPTIONS = [
    {},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 1},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 1e-9},
    {"top_p": 1e-46},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.8, "temperature": 1.7},
    {"temperature": 3.0, "top_k": 12, "top_p": 0.7},
    {"temperature": 0.3, "min_p": 0.05, "top_p": 0.95},
]


def random_rows():
    """Smooth, with ties, all but equal, steep, and with -inf."""
    rng = np.random.default_rng(3)
    smooth = rng.normal(0, 2, (3, VOCAB))
    tied = rng.integers(-3, 3, (3, VOCAB)) * 0.75
    with_holes = np.where(rng.random((2, VOCAB)) < 0.4, -np.inf, rng.normal(0, 3, (2, VOCAB)))
    one_left = np.full((1, VOCAB), -np.inf)
    one_left[0, 41] = -5.0
    rows = [smooth, tied, with_holes, one_left, np.zeros((1, VOCAB)), 60 * smooth[:1]]
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kept_sets_are_the_reference_s(options):
    rows = random_rows()
    kept = np.asarray(kept_mask(jnp.asarray(rows), make_inputs(len(rows), **options)))
    for row, mask in zip(rows, kept, strict=True):
        assert set(np.flatnonzero(mask)) == kept_ids(row, **options)


def test_kept_sets_of_neighbours_with_other_options():
    row = random_rows()[4]
    columns = {
        name: [options.get(name, off) for options in OPTIONS]
        for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    logits = jnp.asarray(np.tile(row, (len(OPTIONS), 1)))
    kept = np.asarray(kept_mask(logits, make_inputs(len(OPTIONS), **columns)))
    for mask, options in zip(kept, OPTIONS, strict=True):
        assert set(np.flatnonzero(mask)) == kept_ids(row, **options)


def test_reference_by_hand():
    logits = np.log(np.array([0.1, 0.4, 0.1, 0.4], np.float32))
    assert kept_ids(logits) == {0, 1, 2, 3}
    assert kept_ids(logits, top_k=1) == {1}
    assert kept_ids(logits, top_k=3) == {0, 1, 3}
    assert kept_ids(logits, top_p=0.3) == {1}
    assert kept_ids(logits, top_p=0.85) == {0, 1, 3}
    assert kept_ids(logits, min_p=0.3) == {1, 3}
    # Each on what the one before left: of {1, 3} the first makes up half.
    assert kept_ids(logits, min_p=0.3, top_p=0.45) == {1}
    np.testing.assert_allclose(expected_distribution(logits, top_k=3), [1 / 9, 4 / 9, 0, 4 / 9])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.2, "temperature": 1.5},
        {"min_p": 0.02, "top_k": 15, "top_p": 0.95, "temperature": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["smooth", "ties and -inf"])
def test_draws_follow_the_distribution(options, kind):
    rng = np.random.default_rng(8)
    num_draws, logits = 4000, rng.normal(0, 1.5, 24).astype(np.float32)
    if kind == "ties and -inf":
        logits = np.round(logits)
        logits[[0, 5, 23]] = -np.inf
    expected = expected_distribution(logits, **options)
    tiled = jnp.asarray(np.tile(logits, (num_draws, 1)))
    fixed = [9] * num_draws
    sources = {
        "positions": make_inputs(num_draws, **options),
        "seeds": make_inputs(num_draws, seeds=range(num_draws), positions=fixed, **options),
        "high words": make_inputs(
            num_draws, seeds=np.arange(num_draws) << 32, positions=fixed, **options
        ),
    }
    wrong = expected_distribution(logits, temperature=options.get("temperature", 1.0) * 1.25)
    for name, inputs in sources.items():
        counts = np.bincount(np.asarray(draw_random(tiled, inputs)[0]), minlength=len(logits))
        assert chi_square(counts, expected) < limit_of(expected), name
        assert chi_square(counts, wrong) > limit_of(wrong), "the comparison cannot fail"


def chi_square(counts, expected):
    """Of the ids that can be drawn; infinite when another one was."""
    if counts[expected == 0].any():
        return np.inf
    wanted = counts.sum() * expected[expected > 0]
    return ((counts[expected > 0] - wanted) ** 2 / wanted).sum()


def limit_of(expected):
    """Mean and five standard deviations of the chi-square distribution."""
    freedom = (expected > 0).sum() - 1
    return freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("top_k", [0, VOCAB, VOCAB + 1])
def test_top_k_off_is_as_if_unset(top_k):
    """B26."""
    rows = jnp.asarray(np.tile(random_rows()[0], (200, 1)))
    tokens = draw_random(rows, make_inputs(200, top_k=top_k))[0]
    np.testing.assert_array_equal(tokens, draw_random(rows, make_inputs(200))[0])
    assert len(np.unique(tokens)) > 10


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-30, 1e-37])
def test_tiny_temperatures_are_greedy(temperature):
    """B28."""
    rng = np.random.default_rng(5)
    rows = rng.permuted(np.tile(np.linspace(-60, 60, VOCAB), (16, 1)), axis=1).astype(np.float32)
    rows[3, 5] = -np.inf
    tokens, is_finite = draw_random(jnp.asarray(rows), make_inputs(16, temperature=temperature))
    np.testing.assert_array_equal(tokens, rows.argmax(axis=1))
    assert np.asarray(is_finite).all()


def test_ties():
    """B29: top_k 1 and temperature 0 take the lowest id, top_p keeps at least one."""
    logits = np.full((1, VOCAB), -1.0, np.float32)
    logits[0, [30, 60]] = 2.0
    for options in ({"top_k": 1}, {"temperature": 0.0}, {"top_p": 1e-9}, {"top_p": 1e-46}):
        for seed in range(5):
            tokens = draw_random(jnp.asarray(logits), make_inputs(1, seeds=[seed], **options))[0]
            assert tokens.tolist() == [30], options
    greedy = draw(jnp.asarray(logits), make_inputs(1, temperature=0.0), Variant.GREEDY)[0]
    assert greedy.tolist() == [30]
    both = np.asarray(
        draw_random(jnp.asarray(np.tile(logits, (50, 1))), make_inputs(50, min_p=1.0))[0]
    )
    assert set(both.tolist()) == {30, 60}


def test_a_draw_depends_on_seed_and_position_alone():
    """B30: alone, in every row of a batch, in other sizes, beside greedy and other seeds."""
    row = random_rows()[0]
    alone = int(
        draw_random(jnp.asarray(row[None]), make_inputs(1, seeds=[77], positions=[5]))[0][0]
    )
    for num_rows in (2, 8):
        for place in range(num_rows):
            logits = np.random.default_rng(place).normal(size=(num_rows, VOCAB)).astype(np.float32)
            seeds, positions = np.arange(num_rows), np.arange(num_rows)
            temperature = np.where(np.arange(num_rows) % 2, 0.0, 1.5)
            logits[place], seeds[place], positions[place], temperature[place] = row, 77, 5, 1.0
            inputs = make_inputs(
                num_rows,
                seeds=seeds,
                positions=positions,
                temperature=temperature,
                rows=[0] * num_rows,
            )
            assert int(draw_random(jnp.asarray(logits), inputs)[0][place]) == alone


def test_key_uses_both_words_and_the_position():
    rows = jnp.zeros((64, VOCAB))
    fixed = [3] * 64
    for name, inputs in {
        "low word": make_inputs(64, seeds=range(64), positions=fixed),
        "high word": make_inputs(64, seeds=np.arange(64) << 32, positions=fixed),
        "sign": make_inputs(64, seeds=-np.arange(64) - 1, positions=fixed),
        "position": make_inputs(64),
    }.items():
        assert len(np.unique(draw_random(rows, inputs)[0])) > 30, name
    same = draw_random(rows, make_inputs(64, seeds=fixed, positions=fixed))[0]
    assert len(np.unique(same)) == 1


@pytest.mark.parametrize("variant", Variant)
def test_rows_that_cannot_be_drawn_from_are_told(variant):
    logits = np.zeros((5, VOCAB), np.float32)
    logits[0, 4] = np.nan
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    logits[3, 3] = -np.inf
    is_finite = draw(jnp.asarray(logits), make_inputs(5), variant)[1]
    assert is_finite.tolist() == [False, False, False, True, True]


def test_greedy_rows_agree_in_all_variants():
    rows = jnp.asarray(random_rows())
    inputs = make_inputs(len(rows), temperature=0.0)
    expected = np.asarray(rows).argmax(axis=1)
    for variant in Variant:
        np.testing.assert_array_equal(draw(rows, inputs, variant)[0], expected)

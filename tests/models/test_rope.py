import math

import jax.numpy as jnp
import numpy as np

from jaxpaged.models.config import RopeConfig
from jaxpaged.models.rope import inverse_frequencies, rope_tables
from kernels_pallas.norm_rope import apply_rope

LLAMA3 = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_default_frequencies_by_hand():
    found = inverse_frequencies(RopeConfig(100.0), 4)
    np.testing.assert_allclose(found, [1.0, 0.1], rtol=1e-7)


def test_llama3_frequencies_follow_the_published_rule():
    expected = []
    for pair in range(32):
        frequency = 10000.0 ** (-2 * pair / 64)
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4.0:
            expected.append(frequency)
        elif wavelength > 64 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    found = inverse_frequencies(LLAMA3, 64)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    plain = inverse_frequencies(RopeConfig(10000.0), 64)
    ratios = found / plain
    kept, slowed = np.isclose(ratios, 1.0), np.isclose(ratios, 1 / 8)
    assert kept.any() and slowed.any() and (~kept & ~slowed).any()


def test_tables_are_float32_and_exact_at_long_positions():
    positions = jnp.array([0, 1, 4095, 100_000], jnp.int32)
    tables = rope_tables(RopeConfig(500000.0), 8, positions)
    assert tables.cos.dtype == tables.sin.dtype == jnp.float32
    frequencies = inverse_frequencies(RopeConfig(500000.0), 8).astype(np.float64)
    angles = np.array([0, 1, 4095, 100_000])[:, None] * frequencies
    # float32 holds an angle of 1e5 to 0.004; the pairs after the first turn more slowly
    np.testing.assert_allclose(tables.cos, np.cos(angles), atol=5e-3)
    np.testing.assert_allclose(tables.sin[:2], np.sin(angles[:2]), atol=1e-6)


def test_a_quarter_turn_by_hand():
    # theta = 1 turns every pair by one radian a position; the pairs are (0, 2) and (1, 3)
    tables = rope_tables(RopeConfig(1.0), 4, jnp.array([1], jnp.int32))
    x = jnp.array([[[1.0, 0.0, 0.0, 2.0]]])
    c, s = math.cos(1.0), math.sin(1.0)
    np.testing.assert_allclose(apply_rope(x, tables)[0, 0], [c, -2 * s, s, 2 * c], rtol=1e-6)


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 16)), jnp.float32) for _ in "qk")

    def score(q_position, k_position):
        turned = [
            apply_rope(x, rope_tables(LLAMA3, 16, jnp.array([position], jnp.int32)))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert math.isclose(score(9, 4), score(105, 100), rel_tol=1e-4)
    assert not math.isclose(score(9, 4), score(9, 5), rel_tol=1e-2)


def test_keeps_the_dtype():
    tables = rope_tables(RopeConfig(10000.0), 4, jnp.arange(2, dtype=jnp.int32))
    assert apply_rope(jnp.ones((2, 1, 4), jnp.bfloat16), tables).dtype == jnp.bfloat16

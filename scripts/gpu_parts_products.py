"""Part of scripts/test_gpu: the Hopper kernels' products and norms, against float32."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.add_norm_hopper import add_norm, can_add_norm
from kernels_pallas.product_hopper import (
    MAX_ROWS,
    can_multiply,
    gated_product,
    product,
    product_tiling,
)
from kernels_pallas.terms import in_terms, result_dtype, sum_of

NUM_RANDOM = 24
MULTIPROCESSORS = 132
# inner, columns, gated: of a layer of Qwen3-4B.
REAL = ((2560, 6144, False), (4096, 2560, False), (2560, 9728, True), (9728, 2560, False))
MAX_TWO_TERM_ROWS = MAX_ROWS // 2
TOLERANCE = 1e-5  # of the largest sum: only the order of float32 additions differs
TWO_TERMS_EPS = 2.0**-16
NORM_EPS = 1e-6


def check_products() -> str:
    """Products of random and of a real model's shapes, and what must be noticed."""
    rng = np.random.default_rng(0)
    shapes = [(rows, *shape) for shape, rows in zip(REAL, (8, 64, 32, 64), strict=True)]
    for _ in range(NUM_RANDOM):
        inner, columns = (64 * int(rng.integers(1, 20)) for _ in range(2))
        shapes.append((8 * int(rng.integers(1, 9)), inner, columns, bool(rng.integers(2))))
    cases = [(1, *shape) for shape in shapes]
    cases += [(2, *shape) for shape in shapes if shape[0] <= MAX_TWO_TERM_ROWS]
    errors = [product_error(rng, *case) for case in cases]
    worst = max(errors)
    assert worst < 1, f"{worst:.1f} times what rounding explains, {cases[int(np.argmax(errors))]}"
    for num_terms in (1, 2):
        control = product_error(rng, num_terms, 8, 256, 256, False, is_wrong=True)
        assert control > 1, f"what is left out of {num_terms} terms was not noticed"
        assert norm_error(rng, num_terms, 8, 256, 3, is_wrong=True) > 1, (
            "a part left out of a sum was not noticed"
        )
    norms = [
        (1 + i % 2, 8 * int(rng.integers(1, 9)), 128 * int(rng.integers(1, 33)), 1 + i // 2 % 8)
        for i in range(NUM_RANDOM)
    ]
    norms += [(1, 64, 2560, 3), (2, 8, 2560, 3)]  # of Qwen3-4B
    worst_norm = max(norm_error(rng, *norm) for norm in norms)
    assert worst_norm < 1, f"a norm has {worst_norm:.1f} times what rounding explains"
    return (
        f"{len(cases)} products, at most {worst:.2f} of what rounding explains, "
        f"{len(norms)} norms, {worst_norm:.2f}"
    )


def norm_error(
    rng: np.random.Generator,
    num_terms: int,
    num_rows: int,
    size: int,
    num_parts: int,
    *,
    is_wrong: bool = False,
) -> float:
    """As `product_error`, of sums and their norms.

    Args:
      is_wrong: what they are compared with lacks the last part.
    """
    x, parts = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((num_rows, size), (num_parts, num_rows, size))
    )
    scale = jnp.asarray(1 + 0.1 * rng.standard_normal(size), jnp.bfloat16)
    assert can_add_norm(x, parts)
    found, terms = add_norm(x, parts, scale, NORM_EPS, num_terms=num_terms)
    expected = np.asarray(x) + np.asarray(parts[:-1] if is_wrong else parts).sum(axis=0)
    mean_square = np.square(expected).mean(axis=1, keepdims=True)
    normed = expected / np.sqrt(mean_square + NORM_EPS) * np.asarray(scale, np.float32)
    rounding = (float(jnp.finfo(jnp.bfloat16).eps), TWO_TERMS_EPS)[num_terms - 1]
    pairs = (
        (np.asarray(found), expected, TOLERANCE),
        (np.asarray(terms, np.float32).sum(axis=0), normed, rounding),
    )
    return max(
        float((np.abs(array - wanted) / (relative * np.abs(wanted) + TOLERANCE)).max())
        for array, wanted, relative in pairs
    )


def product_error(
    rng: np.random.Generator,
    num_terms: int,
    num_rows: int,
    inner: int,
    columns: int,
    is_gated: bool,
    *,
    is_wrong: bool = False,
) -> float:
    """The largest difference to a float32 product, as a share of what is allowed.

    Args:
      is_wrong: what it is compared with lacks a step of the inner axis, of the last term.
    """
    width = columns * (2 if is_gated else 1)
    x, w = (
        jnp.asarray(rng.standard_normal(shape, np.float32) / shape[0] ** 0.5)
        for shape in ((num_rows, inner), (inner, width))
    )
    x, w = x.astype(jnp.bfloat16 if num_terms == 1 else jnp.float32), w.astype(jnp.bfloat16)
    x = in_terms(x, jnp.bfloat16)
    assert can_multiply(x, w, is_gated=is_gated)
    tiling = product_tiling(x, columns, is_gated=is_gated, num_programs=MULTIPROCESSORS)
    found = gated_product(x, w, tiling) if is_gated else product(x, w, tiling, result_dtype(x))
    if is_wrong:
        x = x.at[-1, :, -64:].set(0)
    # On the host: XLA would try many ways of each product first.
    expected = np.asarray(sum_of(x)) @ np.asarray(w, np.float32)
    if is_gated:
        gate, up = np.split(expected, 2, axis=-1)
        expected = gate / (1 + np.exp(-gate)) * up
    is_rounded = found.dtype == jnp.bfloat16
    rounding = (float(jnp.finfo(jnp.bfloat16).eps), TWO_TERMS_EPS)[num_terms - 1] * is_rounded
    size = np.abs(expected)
    allowed = rounding * size + (10 * TOLERANCE if is_gated else TOLERANCE) * size.max()
    return float((np.abs(np.asarray(found, np.float32).sum(axis=0) - expected) / allowed).max())

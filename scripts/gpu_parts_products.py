"""Part of scripts/test_gpu: the Hopper kernel's products with weights, against float32."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.product_hopper import can_multiply, product, product_tiling

NUM_RANDOM = 24
MULTIPROCESSORS = 132
# inner, columns, gated: of a layer of Qwen3-4B.
REAL = ((2560, 6144, False), (4096, 2560, False), (2560, 9728, True), (9728, 2560, False))
TOLERANCE = 1e-5  # of the largest sum: only the order of float32 additions differs


def check_products() -> str:
    """Products of random and of a real model's shapes, and what must be noticed."""
    rng = np.random.default_rng(0)
    shapes = [(rows, *shape) for shape, rows in zip(REAL, (8, 64, 32, 64), strict=True)]
    for _ in range(NUM_RANDOM):
        inner, columns = (64 * int(rng.integers(1, 20)) for _ in range(2))
        shapes.append((8 * int(rng.integers(1, 9)), inner, columns, bool(rng.integers(2))))
    errors = [product_error(rng, *shape) for shape in shapes]
    worst = max(errors)
    assert worst < 1, f"{worst:.1f} times what rounding explains, {shapes[int(np.argmax(errors))]}"
    control = product_error(rng, 8, 256, 256, False, is_wrong=True)
    assert control > 1, "a step of the inner axis that is left out was not noticed"
    return f"{len(shapes)} products, at most {worst:.2f} of what rounding explains"


def product_error(
    rng: np.random.Generator,
    num_rows: int,
    inner: int,
    columns: int,
    is_gated: bool,
    *,
    is_wrong: bool = False,
) -> float:
    """The largest difference to a float32 product, as a share of what is allowed."""
    width = columns * (2 if is_gated else 1)
    x, w = (
        jnp.asarray(rng.standard_normal(shape, np.float32) / shape[0] ** 0.5, jnp.bfloat16)
        for shape in ((num_rows, inner), (inner, width))
    )
    assert can_multiply(x, w, is_gated=is_gated)
    tiling = product_tiling(
        num_rows, inner, columns, is_gated=is_gated, num_programs=MULTIPROCESSORS
    )
    found = product(x, w, tiling, is_gated=is_gated)
    if is_wrong:
        x = x.at[:, -64:].set(0)
    # On the host: XLA would try many ways of each product first.
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    if is_gated:
        gate, up = np.split(expected, 2, axis=-1)
        expected = gate / (1 + np.exp(-gate)) * up
    rounding = 0.0 if tiling.split > 1 else float(jnp.finfo(found.dtype).eps)
    size = np.abs(expected)
    allowed = rounding * size + (10 * TOLERANCE if is_gated else TOLERANCE) * size.max()
    return float((np.abs(np.asarray(found, np.float32).sum(axis=0) - expected) / allowed).max())

"""The parts that all models share. Under tensor parallelism a module sees its device's share.

A parameter says how it is shared among devices: `shard_axis` is the axis that is cut (None: every
device has all of it), `num_parts` how many matrices lie side by side on that axis, so that each is
cut on its own. Sizes of a share are read off the parameters, never from the config. Initial values
(`init_mean`, `init_scale`) make a model whose greedy output varies with its context.

What a product reads is in terms of the dtype of its weights (see `precision.py`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jaxpaged.models.precision import operand_dtype
from kernels_pallas.norm_rope import rms_norm
from kernels_pallas.ops import add_norm, add_parts, gated_matmul, matmul, matmul_in_parts
from kernels_pallas.product import gated, precision_of
from kernels_pallas.terms import in_terms, result_dtype, sum_of


def _parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    init_scale: float,
    init_mean: float = 0.0,
    shard_axis: int | None = None,
    num_parts: int = 1,
) -> nnx.Param[Array]:
    """A parameter with normally distributed initial values, marked as the module's text says."""
    noise = jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(
        (init_mean + init_scale * noise).astype(dtype),
        init_mean=init_mean,
        init_scale=init_scale,
        shard_axis=shard_axis,
        num_parts=num_parts,
    )


class Residual(NamedTuple):
    """What layers hand on: x, and what is still to be added to it. The next norm does that."""

    x: Float[Array, "num_tokens hidden_size"]
    parts: Float[Array, "num_parts num_tokens hidden_size"]

    def total(self) -> Float[Array, "num_tokens hidden_size"]:
        return add_parts(self.x, self.parts)


class RMSNorm(nnx.Module):
    """A learned RMS norm, for products to read."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike, *, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = _parameter(rngs, (size,), dtype, init_scale=0.1, init_mean=1.0)

    def __call__(self, x: Float[Array, "num_rows size"]) -> Float[Array, "num_terms num_rows size"]:
        scale = self.scale[...]
        dtype = operand_dtype(x.shape[0], scale.dtype)
        return in_terms(rms_norm(x, scale, self.eps, dtype), scale.dtype)

    def of_sum(
        self, residual: Residual, *, impl: str | None = None
    ) -> tuple[Float[Array, "num_rows size"], Float[Array, "num_terms num_rows size"]]:
        """The sum, and its norm."""
        x, parts = residual
        scale = self.scale[...]
        dtype = operand_dtype(x.shape[0], scale.dtype)
        return add_norm(x, parts, scale, self.eps, operand_dtype=dtype, impl=impl)


class Linear(nnx.Module):
    """x @ kernel + bias, the kernel `[in, out]`.

    Args:
      shard_axis: 1 gives each device some of the outputs; 0 some of the inputs: call `in_parts`
        then, which adds the devices' sums.
      num_parts: equal matrices that lie side by side in the outputs.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        dtype: DTypeLike,
        *,
        bias: bool,
        shard_axis: int,
        num_parts: int = 1,
        rngs: nnx.Rngs,
    ):
        self.kernel = _parameter(
            rngs,
            (in_size, out_size),
            dtype,
            init_scale=2 / math.sqrt(in_size),
            shard_axis=shard_axis,
            num_parts=num_parts,
        )
        self.bias = (
            _parameter(
                rngs,
                (out_size,),
                dtype,
                init_scale=0.1,
                shard_axis=0 if shard_axis == 1 else None,
                num_parts=num_parts,
            )
            if bias
            else None
        )

    def __call__(
        self,
        x: Float[Array, "num_terms num_tokens in_size"],
        *,
        impl: str | None = None,
    ) -> Float[Array, "num_tokens out_size"]:
        """The sums are float32, and rounded to what x stands for (as in `ops.matmul`)."""
        y = matmul(x, self.kernel[...], impl=impl)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)[None, :]

    def in_parts(
        self,
        x: Float[Array, "num_terms num_tokens in_size"],
        *,
        out_dtype: DTypeLike,
        impl: str | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "num_parts num_tokens out_size"]:
        """The same, to be added up (as in `ops.matmul_in_parts`), of all devices."""
        parts = matmul_in_parts(x, self.kernel[...], out_dtype=out_dtype, impl=impl)
        if axis_name is not None and jax.lax.axis_size(axis_name) > 1:
            # why rounded, where x is: it halves what the devices exchange
            share = sum_of(parts).astype(result_dtype(x))
            parts = jax.lax.psum(share, axis_name).astype(parts.dtype)[None]
        if self.bias is None:
            return parts
        bias = self.bias[...].astype(parts.dtype)
        return (sum_of(parts).astype(parts.dtype) + bias[None, :])[None]


class Embedding(nnx.Module):
    """A row per token id; also the output head, whose logits are products with these rows.

    Devices share the vocabulary where it divides; a share is recognised by its number of rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: DTypeLike, *, rngs: nnx.Rngs):
        self.vocab_size = vocab_size
        scale = 1 / math.sqrt(hidden_size)
        self.table = _parameter(
            rngs, (vocab_size, hidden_size), dtype, init_scale=scale, shard_axis=0
        )

    def __call__(
        self, token_ids: Int32[Array, " num_tokens"], *, axis_name: str | None = None
    ) -> Float[Array, "num_tokens hidden_size"]:
        table = self.table[...]
        if table.shape[0] == self.vocab_size:
            return table[token_ids]
        assert axis_name is not None
        local = token_ids - jax.lax.axis_index(axis_name) * table.shape[0]
        is_mine = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.where(is_mine, local, 0)]
        return jax.lax.psum(jnp.where(is_mine[:, None], rows, 0), axis_name)

    def logits(
        self,
        x: Float[Array, "num_terms num_logit_rows hidden_size"],
        *,
        axis_name: str | None = None,
    ) -> Float32[Array, "num_logit_rows vocab_size"]:
        table, rows = self.table[...], x.reshape(-1, x.shape[2])
        # why this order: at few rows XLA's CPU product is up to three times faster than x @ table.T
        logits = jnp.matmul(
            table, rows.T, precision=precision_of(x.dtype), preferred_element_type=jnp.float32
        ).T
        logits = sum_of(logits.reshape(*x.shape[:2], -1))
        if table.shape[0] == self.vocab_size:
            return logits
        assert axis_name is not None
        return jax.lax.all_gather(logits, axis_name, axis=1, tiled=True)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up side by side in one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: DTypeLike,
        *,
        bias: bool,
        rngs: nnx.Rngs,
    ):
        self.gate_up = Linear(
            hidden_size,
            2 * intermediate_size,
            dtype,
            bias=bias,
            shard_axis=1,
            num_parts=2,
            rngs=rngs,
        )
        self.down = Linear(
            intermediate_size, hidden_size, dtype, bias=bias, shard_axis=0, rngs=rngs
        )

    def __call__(
        self,
        x: Float[Array, "num_terms num_tokens hidden_size"],
        *,
        out_dtype: DTypeLike,
        impl: str | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "num_parts num_tokens hidden_size"]:
        """What is to be added up, as `Linear.in_parts` gives it."""
        if self.gate_up.bias is None:
            out = gated_matmul(x, self.gate_up.kernel[...], impl=impl)
        else:
            out = gated(self.gate_up(x, impl=impl), x.dtype)
        return self.down.in_parts(out, out_dtype=out_dtype, impl=impl, axis_name=axis_name)

"""Grouped-query attention over the paged pool: projections, optional QK norm, RoPE, output."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Linear, RMSNorm
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.norm_rope import HeadNorms, RopeTables
from kernels_pallas.ops import qkv_attention
from kernels_pallas.pool import KVPool


class Attention(nnx.Module):
    """One attention layer.

    The outputs of `qkv` come KV head by KV head: its query heads, its key, its value. A cut between
    KV heads is therefore right for any number of devices that divides them.
    """

    def __init__(
        self, config: ModelConfig, window: int | None, dtype: DTypeLike, *, rngs: nnx.Rngs
    ):
        self.head_dim = config.head_dim
        self.num_q_per_kv = config.num_q_heads // config.num_kv_heads
        self.window = window
        qkv_size = (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            qkv_size,
            dtype,
            bias=config.qkv_bias,
            shard_axis=1,
            rngs=rngs,
        )
        self.o = Linear(
            config.num_q_heads * config.head_dim,
            config.hidden_size,
            dtype,
            bias=config.o_bias,
            shard_axis=0,
            rngs=rngs,
        )
        norms = [
            RMSNorm(config.head_dim, config.rms_norm_eps, dtype, rngs=rngs)
            if config.qk_norm
            else None
            for _ in "qk"
        ]
        self.q_norm, self.k_norm = norms

    def __call__(
        self,
        x: Float[Array, "num_terms num_tokens hidden_size"],
        pool: KVPool,
        layer: Int32[Array, ""] | int,
        rope: RopeTables,
        metadata: AttentionMetadata,
        *,
        out_dtype: DTypeLike,
        impl: str | None = None,
        axis_name: str | None = None,
    ) -> tuple[Float[Array, "num_parts num_tokens hidden_size"], KVPool]:
        """What is to be added up, as `Linear.in_parts` gives it, and the pool with the new KV."""
        num_tokens = x.shape[1]
        heads = self.qkv(x, impl=impl).reshape(num_tokens, -1, self.num_q_per_kv + 2, self.head_dim)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.scale[...], self.k_norm.scale[...], self.q_norm.eps)
        out, pool = qkv_attention(
            heads,
            norms,
            rope,
            pool,
            layer,
            metadata,
            sm_scale=self.head_dim**-0.5,
            window=self.window,
            impl=impl,
        )
        out = out.reshape(*out.shape[:2], -1)
        return self.o.in_parts(out, out_dtype=out_dtype, impl=impl, axis_name=axis_name), pool

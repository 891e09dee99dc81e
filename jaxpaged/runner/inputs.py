"""What the host sends in a step: one int32 vector, and where everything lies in it."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxpaged.runner.buckets import Bucket


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """Per token to draw. Padding draws greedily into the null row.

    Attributes:
      rows: whose options apply, and whose device slot keeps the token.
      positions: absolute index of the token to draw.
      seeds: high and low word of the 64-bit seed.
    """

    rows: Int32[Array, " num_samples"]
    positions: Int32[Array, " num_samples"]
    temperature: Float32[Array, " num_samples"]
    top_k: Int32[Array, " num_samples"]
    top_p: Float32[Array, " num_samples"]
    min_p: Float32[Array, " num_samples"]
    seeds: UInt32[Array, "num_samples 2"]


@dataclass(frozen=True)
class StepLayout:
    """Sizes of the packed vector's parts, in their order there.

    Padding: tokens are 0; rows are the null row (`max_num_seqs`), whose table holds null blocks;
    table updates write the null block into it.
    """

    num_decode_rows: int
    token_ids: int
    rows: int
    q_lens: int
    kv_lens: int
    update_rows: int
    update_idxs: int
    update_blocks: int
    sample_sources: int
    sample_rows: int
    sample_options: int

    @classmethod
    def of(cls, bucket: Bucket, block_size: int) -> "StepLayout":
        rows = bucket.num_rows
        # Blocks that this step's tokens can need; tables taken over whole go another way.
        updates = max_table_updates(bucket, block_size)
        return cls(
            num_decode_rows=1,
            token_ids=bucket.num_tokens,
            rows=rows,
            q_lens=rows,
            kv_lens=rows,
            update_rows=updates,
            update_idxs=updates,
            update_blocks=updates,
            sample_sources=rows,
            sample_rows=rows,
            sample_options=NUM_OPTIONS * rows,
        )

    @property
    def size(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def split[T: (np.ndarray, jax.Array)](self, packed: T) -> dict[str, T]:
        """Views of the packed vector, by part."""
        parts, start = {}, 0
        for part in fields(self):
            end = start + getattr(self, part.name)
            parts[part.name] = packed[start:end]
            start = end
        return parts


# Rows of the options matrix: temperature, top_k, top_p, min_p, high and low word of the seed.
NUM_OPTIONS = 6


def max_table_updates(bucket: Bucket, block_size: int) -> int:
    """Table entries that one packed vector carries."""
    return bucket.num_rows + -(-bucket.num_tokens // block_size)


def sample_inputs(
    rows: Int32[Array, " num_samples"],
    positions: Int32[Array, " num_samples"],
    options: Int32[Array, " num_options_x_samples"],
) -> SampleInputs:
    """Reads the packed options; floats and seed words travel as the bits of an int32."""
    temperature, top_k, top_p, min_p, seed_high, seed_low = options.reshape(NUM_OPTIONS, -1)
    as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)  # noqa: E731
    seeds = jnp.stack([seed_high, seed_low], axis=1)
    return SampleInputs(
        rows=rows,
        positions=positions,
        temperature=as_float(temperature),
        top_k=top_k,
        top_p=as_float(top_p),
        min_p=as_float(min_p),
        seeds=jax.lax.bitcast_convert_type(seeds, jnp.uint32),
    )

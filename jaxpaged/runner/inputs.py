"""What the host sends in a step: one int32 vector, and where everything lies in it."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxpaged.runner.buckets import Bucket

# In place of a token id: the one that the row's device slot holds.
FED_BACK = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """Per token to draw. Padding draws greedily into the null row.

    Attributes:
      rows: whose options apply, and whose device slot keeps the token.
      positions: absolute index of the token to draw.
      last_token_ids: the token before it.
      is_decode: that token was drawn by the row in an earlier step.
      seeds: high and low word of the 64-bit seed.
      first_end_position: tokens drawn before it are no end ids.
    """

    rows: Int32[Array, " num_samples"]
    positions: Int32[Array, " num_samples"]
    last_token_ids: Int32[Array, " num_samples"]
    is_decode: Bool[Array, " num_samples"]
    seeds: UInt32[Array, "num_samples 2"]
    temperature: Float32[Array, " num_samples"]
    top_k: Int32[Array, " num_samples"]
    top_p: Float32[Array, " num_samples"]
    min_p: Float32[Array, " num_samples"]
    repetition_penalty: Float32[Array, " num_samples"]
    presence_penalty: Float32[Array, " num_samples"]
    frequency_penalty: Float32[Array, " num_samples"]
    first_end_position: Int32[Array, " num_samples"]

    @property
    def is_adjusted(self) -> Bool[Array, " num_samples"]:
        """Rows whose logits change before they draw; their packed repetition penalty is not 0."""
        return self.repetition_penalty > 0


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


@dataclass(frozen=True)
class SampleOptions:
    """A row's sampling options as they travel: one int32 each, floats and seed words as bits."""

    temperature: int = 0
    top_k: int = 0
    top_p: int = 0
    min_p: int = 0
    seed_high: int = 0
    seed_low: int = 0
    repetition_penalty: int = 0
    presence_penalty: int = 0
    frequency_penalty: int = 0
    first_end_position: int = 0


NUM_OPTIONS = len(fields(SampleOptions))
NUM_SAMPLE_WORDS = 4 + NUM_OPTIONS


def max_table_updates(bucket: Bucket, block_size: int) -> int:
    """Table entries that one packed vector carries."""
    return bucket.num_rows + -(-bucket.num_tokens // block_size)


def sample_words(
    rows: Int32[Array, " num_samples"],
    positions: Int32[Array, " num_samples"],
    last_token_ids: Int32[Array, " num_samples"],
    is_decode: Bool[Array, " num_samples"],
    options: Int32[Array, " num_options_x_samples"],
) -> Int32[Array, "num_sample_words num_samples"]:
    """What `read_sample_words` reads: one array, for each one more costs a call some host time."""
    words = jnp.stack([rows, positions, last_token_ids, is_decode.astype(jnp.int32)])
    return jnp.concatenate([words, options.reshape(NUM_OPTIONS, -1)])


def read_sample_words(words: Int32[Array, "num_sample_words num_samples"]) -> SampleInputs:
    rows, positions, last_token_ids, is_decode, *options = words
    names = (option.name for option in fields(SampleOptions))
    option = dict(zip(names, options, strict=True))
    seeds = jnp.stack([option.pop("seed_high"), option.pop("seed_low")], axis=1)
    for name in _FLOAT_OPTIONS:
        option[name] = jax.lax.bitcast_convert_type(option[name], jnp.float32)
    return SampleInputs(
        rows=rows,
        positions=positions,
        last_token_ids=last_token_ids,
        is_decode=is_decode > 0,
        seeds=jax.lax.bitcast_convert_type(seeds, jnp.uint32),
        **option,
    )


_FLOAT_OPTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

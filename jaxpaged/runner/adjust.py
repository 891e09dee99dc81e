"""What changes the logits before a token is drawn: masks, biases and penalties.

Order: allowed ids and the grammar's mask, `min_tokens`, `logit_bias`, then the penalties: the
repetition penalty (Keskar et al., "CTRL", 2019) over prompt and output, frequency and presence over
the output.

What each row needs lies on the device, written when a sequence takes the row; the tokens that it
draws afterwards are counted there, so that nothing of the vocabulary's size travels in a step. Rows
that use none of it get their logits back bit for bit.
"""

import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jaxpaged.runner.inputs import SampleInputs, read_sample_words

# Bits of `Adjustments.tokens`; the ones below count how often the output has the token.
IN_PROMPT = 1 << 30
ENDS = 1 << 29
MASK_BITS = 32


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjustments:
    """Per row, what changes its logits; the last row is the null row.

    Attributes:
      tokens: of each token id whether the prompt has it, whether it ends the sequence, and how
        often the output has it.
      bias: to be added to the logits; -inf where a token is not allowed.
    """

    tokens: Int32[Array, "max_num_seqs+1 vocab"]
    bias: Float32[Array, "max_num_seqs+1 vocab"]


def adjustments_row(
    vocab_size: int,
    *,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    end_token_ids: Iterable[int],
    logit_bias: Mapping[int, float],
    allowed_token_ids: Iterable[int] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """One row of `Adjustments.tokens` and of `Adjustments.bias`, on the host."""
    tokens = np.bincount(np.array(output_token_ids, np.int64), minlength=vocab_size)
    tokens = tokens.astype(np.int32)
    tokens[list(prompt_token_ids)] |= IN_PROMPT
    tokens[list(end_token_ids)] |= ENDS
    bias = np.full(vocab_size, 0.0 if allowed_token_ids is None else -np.inf, np.float32)
    if allowed_token_ids is not None:
        bias[list(allowed_token_ids)] = 0.0
    if logit_bias:
        bias[list(logit_bias)] += np.array(list(logit_bias.values()), np.float32)
    return tokens, bias


def write_row(
    adjustments: Adjustments,
    row: Int32[Array, ""],
    tokens: Int32[Array, " vocab"],
    bias: Float32[Array, " vocab"],
) -> Adjustments:
    """A sequence takes the row."""
    return Adjustments(
        adjustments.tokens.at[row].set(tokens, mode="promise_in_bounds"),
        adjustments.bias.at[row].set(bias, mode="promise_in_bounds"),
    )


def adjust_step(
    logits: Float32[Array, "num_samples vocab"],
    adjustments: Adjustments,
    words: Int32[Array, "words num_samples"],
    masks: Int32[Array, "num_samples mask_words"],
) -> tuple[Float32[Array, "num_samples vocab"], Adjustments]:
    """Counts the tokens that the rows drew last, then adjusts the logits.

    Args:
      adjustments: donated.
      masks: bit i of word w allows token 32 * w + i; all ones for rows without a grammar.
    """
    inputs = read_sample_words(words)
    # A row's first token comes from its prompt: what precedes it was counted when the row started.
    is_new = (inputs.is_decode & inputs.is_adjusted).astype(jnp.int32)
    tokens = adjustments.tokens.at[inputs.rows, inputs.last_token_ids].add(
        is_new, mode="promise_in_bounds"
    )
    adjusted = adjust_logits(logits, tokens[inputs.rows], adjustments.bias[inputs.rows], inputs)
    allowed = unpack_masks(masks, logits.shape[1])
    return jnp.where(allowed, adjusted, -jnp.inf), Adjustments(tokens, adjustments.bias)


def adjust_logits(
    logits: Float32[Array, "num_samples vocab"],
    tokens: Int32[Array, "num_samples vocab"],
    bias: Float32[Array, "num_samples vocab"],
    inputs: SampleInputs,
) -> Float32[Array, "num_samples vocab"]:
    """Applies the options of the rows whose `inputs.is_adjusted` is set.

    Args:
      tokens: the rows of `Adjustments.tokens`.
      bias: the rows of `Adjustments.bias`.
    """

    def of_row(option: Array) -> Array:
        return option[:, None]

    count = tokens & (ENDS - 1)
    may_end = of_row(inputs.positions >= inputs.first_end_position)
    biased = jnp.where((tokens & ENDS > 0) & ~may_end, -jnp.inf, logits + bias)
    repetition = of_row(inputs.repetition_penalty)
    repeated = jnp.where(biased > 0, biased / repetition, biased * repetition)
    penalised = jnp.where((count > 0) | (tokens & IN_PROMPT > 0), repeated, biased)
    penalised -= of_row(inputs.frequency_penalty) * count.astype(jnp.float32)
    penalised -= jnp.where(count > 0, of_row(inputs.presence_penalty), 0.0)
    return jnp.where(of_row(inputs.is_adjusted), penalised, logits)


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // MASK_BITS)


def unpack_masks(
    masks: Int32[Array, "num_samples mask_words"], vocab_size: int
) -> Bool[Array, "num_samples vocab"]:
    bits = masks[:, :, None] >> jnp.arange(MASK_BITS, dtype=jnp.int32)[None, None, :]
    return (bits & 1 > 0).reshape(masks.shape[0], -1)[:, :vocab_size]

"""A user's own function between the adjusted logits and the draw.

The function sees one row; it is vectorised over the rows of a step that use it and compiled once,
for `max_num_seqs` rows, however large the step is.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxpaged.errors import InvalidFieldError
from jaxpaged.runner.adjust import ENDS, IN_PROMPT, Adjustments
from jaxpaged.runner.inputs import read_sample_words


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsState:
    """What a logits processor may look at, beside one row's logits.

    Attributes:
      position: index of the token to draw, counted from the prompt's first.
      last_token_id: the token before it.
      in_prompt: whether the prompt has the token.
      output_counts: how often the output has the token.
    """

    position: Int32[Array, ""]
    last_token_id: Int32[Array, ""]
    in_prompt: Bool[Array, " vocab"]
    output_counts: Int32[Array, " vocab"]


_MAX_LINE = 200
LogitsProcessor = Callable[[jax.Array, LogitsState], jax.Array]


def take_rows(
    logits: Float32[Array, "num_samples vocab"],
    adjustments: Adjustments,
    words: Int32[Array, "words num_samples"],
    idxs: Int32[Array, " max_num_seqs"],
) -> tuple[Float32[Array, "max_num_seqs vocab"], LogitsState]:
    """The rows at `idxs`, which may repeat."""
    inputs = read_sample_words(words)
    tokens = adjustments.tokens[inputs.rows[idxs]]
    state = LogitsState(
        position=inputs.positions[idxs],
        last_token_id=inputs.last_token_ids[idxs],
        in_prompt=tokens & IN_PROMPT > 0,
        output_counts=tokens & (ENDS - 1),
    )
    return logits[idxs], state


def put_rows(
    logits: Float32[Array, "num_samples vocab"],
    processed: Float32[Array, "max_num_seqs vocab"],
    idxs: Int32[Array, " max_num_seqs"],
) -> Float32[Array, "num_samples vocab"]:
    """Puts the rows back; those that repeat in `idxs` are equal.

    What was masked stays masked, whatever the function made of it.
    """
    rows = jnp.where(jnp.isneginf(logits[idxs]), -jnp.inf, processed)
    return logits.at[idxs].set(rows, mode="promise_in_bounds")


def check_pure(program: str) -> None:
    """Refuses a traced function that calls back into Python: what it raises would hurt all rows."""
    for callback in ("pure_callback", "io_callback"):
        if callback in program:
            raise InvalidFieldError(
                "logits_processor", f"logits_processor uses {callback}: it must be JAX only"
            )


def vectorised(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor over rows.

    Raises:
      InvalidFieldError: it fails when it is traced, or gives no logits.
    """

    def process(logits: jax.Array, states: LogitsState) -> jax.Array:
        try:
            processed = jax.vmap(processor)(logits, states)
            fits = processed.shape == logits.shape
            fits = fits and jnp.issubdtype(processed.dtype, jnp.floating)
        except Exception as error:
            # JAX explains its errors on many lines.
            line = " ".join(str(error).split())[:_MAX_LINE]
            raise InvalidFieldError(
                "logits_processor", f"logits_processor failed: {type(error).__name__}: {line}"
            ) from error
        if not fits:
            raise InvalidFieldError(
                "logits_processor",
                f"logits_processor gave {processed.dtype}{list(processed.shape[1:])} a row: must "
                f"be floats[{logits.shape[1]}], as its argument",
            )
        return processed.astype(jnp.float32)

    return process

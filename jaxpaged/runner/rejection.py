"""A draw from what top_k and top_p keep, without finding what they keep.

The largest of logit + Gumbel noise over all tokens is a draw from the kept ones if it is one of
them. If it is not, no token from it on (best first, of equals the lowest id) is kept either, and
the largest of those before it is tried next. What decides is the weight and the number of the
tokens before it: one pass over the rows, which finds the next one, too. At top_p 0.9 a row in ten
needs a second pass. The first token in order is always kept, so that every row ends.

Tokens are known by their gap: how far the logit is below the row's best, over temperature.
"""

import typing
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxpaged.runner.exact_sum import MAX_ADDED, carry, digits_of, parts_of, weight_of

_INF_BITS = 0x7F800000
# Rows are reduced in chunks of this, then the chunks. why: XLA would cut a long row itself, and
# then not fuse what the operands share.
_CHUNK = MAX_ADDED
# Gaps tried in one pass of the search for the k best, as bits. The first are from 1/8 to 16, a
# factor of 1.5 or less apart: most rows' k-th best is among them.
_NUM_TRIED = 15
_FIRST_TRIED = [0x3E000000 + (i << 22) for i in range(_NUM_TRIED)]
# So that nothing keeps a device busy for ever: no fault, and no logits that rise where the noise
# falls, made by someone who knows the seed. Otherwise a round leaves, of the weight before a row's
# token, a part that is uniform in 0 to 1: from a vocabulary to one token takes 13 rounds on
# average, and more than 64 once in 10**26 draws.
_MAX_ROUNDS = 256


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Limits:
    """A token is kept if the tokens before it weigh and are less than this.

    Attributes:
      weight: in units of the best token's; positive, inf = no limit.
      count: positive.
    """

    weight: Float32[Array, " num_samples"]
    count: Int32[Array, " num_samples"]

    def keep(
        self, weight: Float32[Array, " num_samples"], count: Int32[Array, " num_samples"]
    ) -> Bool[Array, " num_samples"]:
        """Whether the token is kept that has this before it."""
        return (weight < self.weight) & (count < self.count)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Before:
    """The tokens before one, in a row's order: best first, of equals the lowest id.

    Attributes:
      digits: their weight, see exact_sum.py.
      noisiest: the id of the one with the largest sum of logit and noise.
    """

    digits: tuple[UInt32[Array, " num_samples"], ...]
    count: Int32[Array, " num_samples"]
    noisiest: Int32[Array, " num_samples"]

    @property
    def weight(self) -> Float32[Array, " num_samples"]:
        """In units of the best token's."""
        return weight_of(self.digits)


def draw_kept(
    gaps: Float32[Array, "num_samples padded"],
    noisy: Float32[Array, "num_samples padded"],
    top_k: Int32[Array, " num_samples"],
    top_p: Float32[Array, " num_samples"],
    *,
    has_both: bool,
) -> tuple[Int32[Array, " num_samples"], Bool[Array, " num_samples"]]:
    """The id of the largest `noisy` among the tokens that top_k, then top_p leave.

    Args:
      gaps: inf for what cannot be drawn.
      noisy: noise less `gaps`.
      top_k: 0 = off.
      top_p: 1 = off.
      has_both: whether a row may have both. It costs a search, and changes no other row's draw.

    Returns:
      The ids, and whether they were found: not where `_MAX_ROUNDS` were too few.
    """
    limits, token_ids = find_limits(gaps, noisy, top_k, top_p, has_both=has_both)
    rows = jnp.arange(len(gaps))

    def are_open(state: tuple[jax.Array, ...]) -> jax.Array:
        # why a comparison: in a CUDA graph, XLA waits for a condition only where it takes a kernel
        _, _, num_open, num_rounds = state
        return (num_open > 0) & (num_rounds < _MAX_ROUNDS)

    def try_next(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tried, _, _, num_rounds = state
        own = gaps.at[rows, tried].get(mode="promise_in_bounds")
        before = look_before(gaps, noisy, _bits(own), tried)
        is_kept = limits.keep(before.weight, before.count)
        tried = jnp.where(is_kept, tried, before.noisiest)
        return tried, is_kept, _count(~is_kept), num_rounds + 1

    has_limit = (limits.weight < jnp.inf) | (limits.count < gaps.shape[1])
    state = token_ids, ~has_limit, _count(has_limit), jnp.int32(0)
    token_ids, is_kept, _, _ = jax.lax.while_loop(are_open, try_next, state)
    return token_ids, is_kept


def find_limits(
    gaps: Float32[Array, "num_samples padded"],
    noisy: Float32[Array, "num_samples padded"],
    top_k: Int32[Array, " num_samples"],
    top_p: Float32[Array, " num_samples"],
    *,
    has_both: bool,
) -> tuple[Limits, Int32[Array, " num_samples"]]:
    """What a kept token may have before it, and the first token to try; see `draw_kept`."""
    vocab = gaps.shape[1]
    farthest = jnp.full(len(gaps), _INF_BITS, jnp.int32)
    surplus = jnp.zeros(len(gaps), jnp.uint32)
    if has_both:
        wanted = jnp.where((top_k > 0) & (top_p < 1), jnp.minimum(top_k, vocab), vocab)
        farthest, surplus = _find_best(gaps, wanted)
    before = look_before(gaps, noisy, farthest + 1, jnp.zeros_like(farthest))
    # top_p is a part of what top_k leaves: not of the k-th best's surplus equals.
    worst = parts_of(jnp.exp(-jax.lax.bitcast_convert_type(farthest, jnp.float32)))
    left_out = carry(tuple(surplus * digit for digit in digits_of(*worst, 1)))
    total = weight_of(
        tuple((a - b).astype(jnp.int32) for a, b in zip(before.digits, left_out, strict=True))
    )
    # Never 0: a top_p too small for float32 still keeps the best token.
    weight = jnp.maximum(top_p * total, jnp.finfo(jnp.float32).tiny)
    limits = Limits(
        weight=jnp.where(top_p < 1, weight, jnp.inf), count=jnp.where(top_k > 0, top_k, vocab)
    )
    return limits, before.noisiest


def look_before(
    gaps: Float32[Array, "num_samples padded"],
    noisy: Float32[Array, "num_samples padded"],
    bounds: Int32[Array, " num_samples"],
    token_ids: Int32[Array, " num_samples"],
) -> Before:
    """What is before a token of each row.

    Args:
      bounds: the bits of the tokens' gaps.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, gaps.shape, 1)
    # -1 where a token is before, else 0. why no comparison: XLA would keep its results in memory.
    mask = _sign(_bits(gaps) - bounds[:, None] + _sign(ids - token_ids[:, None]))
    weights = _masked(jnp.exp(-gaps), mask)
    operands = (jnp.where(mask < 0, noisy, -jnp.inf), ids, *parts_of(weights), mask)
    zeros = (jnp.uint32(0),) * 2
    start = (jnp.float32(-jnp.inf), jnp.int32(gaps.shape[1] - 1), *zeros, jnp.int32(0))
    # why one reduction: the rows are read once
    noisy, ids, high, low, masks = _reduce_chunks(operands, start, _join)
    num_added = min(_CHUNK, gaps.shape[1])
    operands = (noisy, ids, *digits_of(high, low, num_added), masks)
    start = (*start[:2], *zeros, jnp.uint32(0), jnp.int32(0))
    _, noisiest, *digits, masks = jax.lax.reduce(operands, start, _join, (1,))
    return Before(carry(tuple(digits)), -masks, noisiest)


def _join(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Of the first two the larger with its id, of equals the lower id; of the others the sum."""
    (noisy, ids, *sums), (other, other_ids, *others) = left, right
    is_left = (noisy > other) | ((noisy == other) & (ids < other_ids))
    added = [a + b for a, b in zip(sums, others, strict=True)]
    return jnp.where(is_left, noisy, other), jnp.where(is_left, ids, other_ids), *added


def _find_best(
    gaps: Float32[Array, "num_samples padded"], wanted: Int32[Array, " num_samples"]
) -> tuple[Int32[Array, " num_samples"], UInt32[Array, " num_samples"]]:
    """Bits of a gap within which each row's `wanted` best tokens are, and how many more.

    More only where the farthest of them are equals. Passes are few, whatever the row holds.
    """

    def is_open(near: jax.Array, far: jax.Array, num_within: jax.Array) -> jax.Array:
        return (num_within > wanted) & (far - near > 1)

    def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        near, far, num_within, _ = state
        is_first = far - near > _INF_BITS
        step = (far - near) // (_NUM_TRIED + 1) + 1
        tried = [
            jnp.where(is_first, first, jnp.minimum(near + step * (i + 1), far))
            for i, first in enumerate(_FIRST_TRIED)
        ]
        own = _bits(gaps)  # why here: outside it would be an array of its own
        within = tuple((own <= bound[:, None]).astype(jnp.int32) for bound in tried)
        zeros = (jnp.int32(0),) * _NUM_TRIED
        counts = _reduce_chunks(within, zeros, _add)
        counts = jax.lax.reduce(counts, zeros, _add, (1,))
        for bound, count in zip(tried, counts, strict=True):
            near = jnp.where(count < wanted, jnp.maximum(near, bound), near)
        for bound, count in zip(reversed(tried), reversed(counts), strict=True):
            far = jnp.where(count >= wanted, bound, far)
            num_within = jnp.where(count >= wanted, count, num_within)
        return near, far, num_within, _count(is_open(near, far, num_within))

    # Too few are within `near`, enough within `far`.
    near = jnp.full(len(gaps), -1, jnp.int32)
    far = jnp.full(len(gaps), _INF_BITS, jnp.int32)
    num_within = jnp.full(len(gaps), gaps.shape[1], jnp.int32)
    state = near, far, num_within, jnp.int32(len(gaps))
    # why a comparison: see draw_kept
    _, far, num_within, _ = jax.lax.while_loop(lambda state: state[-1] > 0, narrow, state)
    return far, (num_within - wanted).astype(jnp.uint32)


def pad_vocab(gaps: Float32[Array, "num_samples vocab"]) -> Float32[Array, "num_samples padded"]:
    """Appends tokens that cannot be drawn, up to a width that the functions here take."""
    vocab = gaps.shape[1]
    padding = 0 if vocab < _CHUNK else -vocab % _CHUNK
    return jnp.pad(gaps, ((0, 0), (0, padding)), constant_values=jnp.inf)


def _reduce_chunks(operands: Any, start: Any, join: Any) -> Any:
    """`jax.lax.reduce` of [num_samples, padded] to [num_samples, chunks]."""
    num_samples, width = operands[0].shape
    shape = num_samples, -1, min(_CHUNK, width)
    return jax.lax.reduce(tuple(x.reshape(shape) for x in operands), start, join, (2,))


def _count(flags: Bool[Array, " num_samples"]) -> Int32[Array, ""]:
    return flags.sum(dtype=jnp.int32)


def _add(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.add, left, right))


def _sign(x: Int32[Array, "..."]) -> Int32[Array, "..."]:
    return x >> jnp.int32(31)


def _bits(gaps: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Gaps as integers in the same order. why: a CPU takes denormal numbers for 0."""
    return jax.lax.bitcast_convert_type(gaps, jnp.int32)


def _masked(weights: Float32[Array, "..."], mask: Int32[Array, "..."]) -> Float32[Array, "..."]:
    kept = jax.lax.bitcast_convert_type(weights, jnp.int32) & mask
    return jax.lax.bitcast_convert_type(kept, jnp.float32)

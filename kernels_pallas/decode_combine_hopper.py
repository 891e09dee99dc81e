"""What the decode kernel's workers wrote of shared units, merged in float32; for Hopper GPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from kernels_pallas.decode_parts_hopper import DecodeShape
from kernels_pallas.decode_plan import DecodePlan, RowColumn, WorkerColumn
from kernels_pallas.hopper_parts import (
    LOG2E,
    NEVER,
    WARPGROUP,
    interpreted_options,
    split_off,
)

# Partial results whose loads overlap: where units are fewer than workers, one unit has many, and
# elsewhere more programs fit beside each other with fewer registers.
MANY_AT_ONCE, FEW_AT_ONCE = 16, 4


def combine(
    out: Array,
    partials: Array,
    stats: Array,
    plan: DecodePlan,
    shape: DecodeShape,
    sinks: Array | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> Array:
    """Merges the partial results of units that several workers shared; in place.

    Programs for each worker, not for each unit: most units are nobody's concern here. Each takes as
    few of a unit's queries as fill a warpgroup: how long one takes matters more than how many there
    are.
    """
    num_queries = max(1, WARPGROUP // shape.head_dim)
    num_units, num_workers = plan.rows.shape[0] * shape.num_kv_heads, plan.workers.shape[0]
    flat_out = jax.new_ref(out.reshape(*out.shape[:2], -1))
    flat_partials = partials.reshape(*partials.shape[:2], -1)
    kernel = plgpu.kernel(
        functools.partial(
            _combine_queries,
            shape=shape,
            num_queries=num_queries,
            at_once=MANY_AT_ONCE if num_units <= num_workers else FEW_AT_ONCE,
        ),
        out_type=(),
        grid=(num_workers, shape.out_group // num_queries),
        grid_names=("worker", "queries"),
        kernel_name="decode_combine",
        **interpreted_options(interpret),
    )
    kernel(plan.workers, flat_partials, stats, sink_rows(sinks, shape), flat_out)
    return jax.freeze(flat_out).reshape(out.shape)


def _combine_queries(
    workers_ref,  # i32[num_workers, 8] GMEM
    partials_ref,  # [places, 2, padded_group * head_dim] GMEM
    stats_ref,  # f32[places, 2 (m and l), padded_group] GMEM
    sinks_ref,  # f32[kv heads, padded_group] GMEM
    out_ref,  # [num_terms, num_rows, kv heads * out_group * head_dim] GMEM
    *,
    shape: DecodeShape,
    num_queries: int,
    at_once: int,
):
    worker = lax.axis_index("worker")
    position = workers_ref[worker, WorkerColumn.BEGIN]
    row = workers_ref[worker, WorkerColumn.FIRST_ROW]
    num_segments = workers_ref[worker, WorkerColumn.NUM_SEGMENTS]
    row_begin = workers_ref[worker, WorkerColumn.of_first_row(RowColumn.BEGIN)]
    row_end = workers_ref[worker, WorkerColumn.of_first_row(RowColumn.END)]
    tiles = lax.div(row_end - row_begin, jnp.int32(shape.num_kv_heads))
    tiles = jnp.maximum(tiles, 1)
    head = lax.div(position - row_begin, tiles)
    begin = row_begin + head * tiles
    share = jnp.maximum(workers_ref[0, WorkerColumn.END] - workers_ref[0, WorkerColumn.BEGIN], 1)
    first = lax.div(begin, share)
    last = lax.div(begin + tiles - 1, share)

    # The second of the workers that share the unit, for it begins inside.
    @pl.when((num_segments > 0) & (first + 1 == worker) & (begin < position))
    def _():
        size = num_queries * shape.head_dim
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // WARPGROUP)
        element = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
        query = lax.div(element, jnp.int32(shape.head_dim))
        first_query = lax.axis_index("queries") * num_queries
        queries = [first_query + i for i in range(num_queries)]

        def spread(values):
            """One scalar a query -> one value an element."""
            result = plgpu.layout_cast(jnp.full((size,), values[0], jnp.float32), layout)
            for i in range(1, num_queries):
                result = jnp.where(query == i, values[i], result)
            return result

        def load_part(place, term: int):
            columns = pl.ds(first_query * shape.head_dim, size)
            return plgpu.load(partials_ref.at[place, term, columns], layout=layout)

        def places(chunk):
            """(place, is one of the unit's) for some workers at once: their loads overlap."""
            workers = [first + chunk * at_once + i for i in range(at_once)]
            # A worker's first segment is in place 0, any later one in place 1.
            return [
                (2 * jnp.minimum(w, last) + jnp.where(w * share >= begin, 0, 1), w <= last)
                for w in workers
            ]

        def merge(chunk, carry):
            acc, ms, sums = carry
            found = places(chunk)
            parts = [[load_part(place, term) for term in range(2)] for place, _ in found]
            highs = ms
            for place, is_real in found:
                here = [jnp.where(is_real, stats_ref[place, 0, q], NEVER) for q in queries]
                highs = tuple(jnp.maximum(m, other) for m, other in zip(highs, here, strict=True))
            decays = [jnp.exp2(m - high) for m, high in zip(ms, highs, strict=True)]
            acc = acc * spread(decays)
            sums = tuple(total * decay for total, decay in zip(sums, decays, strict=True))
            for (place, is_real), terms in zip(found, parts, strict=True):
                weights = [
                    jnp.where(is_real, stats_ref[place, 1, q], 0.0)
                    * jnp.exp2(stats_ref[place, 0, q] - high)
                    for q, high in zip(queries, highs, strict=True)
                ]
                for term in terms:
                    acc = acc + spread(weights) * term.astype(jnp.float32)
                sums = tuple(total + w for total, w in zip(sums, weights, strict=True))
            return acc, highs, sums

        num_chunks = lax.div(last - first, jnp.int32(at_once)) + 1
        zeros = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)
        sinks = tuple(sinks_ref[head, q] for q in queries)
        # Without sinks, NEVER weighs exp2(NEVER - m) = 0: a shared unit has keys.
        start = (zeros, sinks, (jnp.float32(1),) * num_queries)
        acc, _, sums = lax.fori_loop(0, num_chunks, merge, start)
        rest = acc * spread([1.0 / total for total in sums])
        begin_column = (head * shape.out_group + first_query) * shape.head_dim
        for term in range(shape.num_terms):
            rounded, rest = split_off(rest, shape.dtype)
            out_ref[term, row, pl.ds(begin_column, size)] = rounded


def sink_rows(sinks: Array | None, shape: DecodeShape) -> Array:
    """Sinks by KV head, in base 2; without any, scores that no softmax notices."""
    rows = jnp.full((shape.num_kv_heads, shape.padded_group), NEVER, jnp.float32)
    if sinks is None:
        return rows
    return rows.at[:, : shape.group].set(sinks.reshape(shape.num_kv_heads, -1) * LOG2E)

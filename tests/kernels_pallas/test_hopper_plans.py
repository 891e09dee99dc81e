"""Plans of the Hopper kernels against a plain model: all is computed once, shares are even."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.decode_plan import RowColumn, WorkerColumn, make_decode_plan
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.prefill_plan import TileColumn, make_prefill_plan

KV_TILE, Q_TILE = 4, 8


def make_metadata(q_lens, kv_lens, num_tokens, num_decode_rows=0):
    return AttentionMetadata(
        block_tables=jnp.zeros((len(kv_lens), 1), jnp.int32),
        q_lens=jnp.asarray(q_lens, jnp.int32),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        slot_mapping=jnp.zeros(num_tokens, jnp.int32),
        num_decode_rows=jnp.int32(num_decode_rows),
    )


def decode_plan(kv_lens, num_rows, **options):
    metadata = make_metadata([1] * len(kv_lens), kv_lens, len(kv_lens))
    return _decode_plan(metadata, jnp.int32(num_rows), **options)


@functools.partial(jax.jit, static_argnames=("num_kv_heads", "num_workers", "window"))
def _decode_plan(metadata, num_rows, *, num_kv_heads, num_workers, window):
    return make_decode_plan(
        metadata,
        num_rows,
        num_kv_heads=num_kv_heads,
        kv_tile=KV_TILE,
        num_workers=num_workers,
        window=window,
    )


def wanted_tiles(kv_len, window):
    """The tiles of a row that a query sees; an empty row has one, to write its zeros."""
    first = 0 if window is None else max(0, kv_len - window) // KV_TILE
    return list(range(first, max(-(-kv_len // KV_TILE), first + 1)))


def walk(plan, num_kv_heads):
    """What each worker does, as the kernel walks: (worker, number, row, head, tiles, is whole)."""
    rows, workers = np.asarray(plan.rows), np.asarray(plan.workers)
    for worker, entries in enumerate(workers):
        position, row = int(entries[WorkerColumn.BEGIN]), int(entries[WorkerColumn.FIRST_ROW])
        end = entries[WorkerColumn.END]
        of_first_row = [entries[WorkerColumn.of_first_row(column)] for column in RowColumn]
        np.testing.assert_array_equal(of_first_row, rows[row])
        for number in range(entries[WorkerColumn.NUM_SEGMENTS]):
            row_begin, row_end = rows[row, RowColumn.BEGIN], rows[row, RowColumn.END]
            first_tile = rows[row, RowColumn.FIRST_TILE]
            tiles = (row_end - row_begin) // num_kv_heads
            head, tile = divmod(position - row_begin, tiles)
            count = min(tiles - tile, end - position)
            here = [int(first_tile + tile + i) for i in range(count)]
            yield worker, number, row, int(head), here, count == tiles
            position += count
            row += position == row_end
        assert position == end


def check_decode(kv_lens, num_rows, num_kv_heads, num_workers, window):
    plan = decode_plan(
        kv_lens, num_rows, num_kv_heads=num_kv_heads, num_workers=num_workers, window=window
    )
    np.testing.assert_array_equal(plan.rows[:, RowColumn.KV_LEN], kv_lens)
    found: dict[tuple[int, int], list[int]] = {}
    loads, places = [0] * num_workers, set()
    for worker, number, row, head, tiles, is_whole in walk(plan, num_kv_heads):
        assert tiles, "an empty segment"
        found.setdefault((row, head), []).extend(tiles)
        loads[worker] += len(tiles)
        if not is_whole:
            # As the kernel has it: place 0 for a worker's first segment, else 1.
            place = worker, min(number, 1)
            assert place not in places
            places.add(place)
    assert found == {
        (row, head): wanted_tiles(kv_lens[row], window)
        for row in range(num_rows)
        for head in range(num_kv_heads)
    }
    total = sum(loads)
    assert max(loads, default=0) <= -(-total // num_workers)


@pytest.mark.parametrize("window", [None, 1, 6])
def test_decode_covers_every_tile_once(window):
    """All triples of lengths around the tile's borders, all numbers of rows."""
    lens = (0, 1, 4, 5, 23)
    for index, kv_lens in enumerate(itertools.product(lens, repeat=3)):
        num_kv_heads, num_workers = ((1, 1), (2, 3), (3, 16), (1, 5))[index % 4]
        check_decode(kv_lens, index % 4, num_kv_heads, num_workers, window)


def test_decode_shares_are_even_for_any_lengths():
    rng = np.random.default_rng(0)
    for index in range(30):
        kv_lens = rng.integers(0, 300, 9).tolist()
        check_decode(kv_lens, 9, 2, (7, 40, 264)[index % 3], (None, 50)[index % 2])


def test_the_model_notices_a_wrong_plan():
    plan = decode_plan((9, 20), 2, num_kv_heads=1, num_workers=2, window=None)
    begins = plan.workers.at[1, WorkerColumn.BEGIN].add(1)
    shifted = type(plan)(plan.rows, begins)
    tiles = [tile for *_, tiles, _ in walk(shifted, 1) for tile in tiles]
    assert tiles != [*range(3), *range(5)]


def check_prefill(rows, num_decode_rows, num_tokens):
    q_lens, kv_lens = zip(*rows, strict=True)
    metadata = make_metadata(q_lens, kv_lens, num_tokens, num_decode_rows)
    plan = make_prefill_plan(metadata, Q_TILE)
    tiles, num_tiles = np.asarray(plan.tiles), int(plan.num_tiles[0])
    found: dict[tuple[int, int], int] = {}
    for tile in tiles[:num_tiles]:
        row, token = tile[TileColumn.ROW], tile[TileColumn.TOKEN]
        count, position = tile[TileColumn.NUM_QUERIES], tile[TileColumn.POSITION]
        assert 0 < count <= Q_TILE
        for i in range(count):
            key = int(token + i), int(row)
            assert key not in found, "a query in two tiles"
            found[key] = int(position + i)
    starts = np.cumsum([0, *q_lens])
    assert found == {
        (int(starts[row]) + i, row): kv_len - q_len + i
        for row, (q_len, kv_len) in enumerate(rows)
        if row >= num_decode_rows
        for i in range(q_len)
    }
    positions = tiles[:num_tiles, TileColumn.POSITION]
    assert (np.diff(positions) <= 0).all(), "the longest tiles come first"
    assert (tiles[num_tiles:, TileColumn.NUM_QUERIES] == 0).all()


def test_prefill_covers_every_query_once():
    """All pairs of chunks around the tile's borders, behind decode rows and before padded rows."""
    chunks = ((1, 1), (1, 30), (7, 9), (8, 8), (9, 40), (25, 25))
    for index, pair in enumerate(itertools.product(chunks, repeat=2)):
        num_decode_rows = index % 3
        rows = [(1, 5 + index)] * num_decode_rows + list(pair) + [(0, 0)] * (2 - num_decode_rows)
        check_prefill(rows, num_decode_rows, sum(q for q, _ in rows) + index % 2)


def test_prefill_without_prompts_has_no_tiles():
    check_prefill([(1, 9), (1, 4), (0, 0)], 2, 5)

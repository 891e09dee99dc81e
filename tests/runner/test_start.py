"""What a start decides from the memory."""

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.errors import InvalidFieldError
from jaxpaged.runner import start

CONFIG = EngineConfig("tiny", memory_fraction=1.0, max_num_seqs=8)
GIGABYTE = 2**30


def blocks_that_fit(runner, monkeypatch, memory_bytes: int) -> int:
    monkeypatch.setattr(start, "_memory_bytes", lambda: memory_bytes)
    return start._num_blocks_that_fit(CONFIG, runner.weights, 64)


def test_a_pool_keeps_its_size_when_the_memory_hardly_differs(tiny_runner, monkeypatch):
    """Or every program would be compiled anew: they are for one size."""
    runner = tiny_runner("tiny_qwen3")
    block_bytes = runner.pool.data.nbytes // 101
    sizes = [
        blocks_that_fit(runner, monkeypatch, GIGABYTE + i * 10 * block_bytes) for i in range(100)
    ]
    assert GIGABYTE // block_bytes > 10_000 and len(set(sizes)) <= 10
    # Negative control: more memory is used, and little of it is lost.
    assert blocks_that_fit(runner, monkeypatch, 2 * GIGABYTE) > 1.9 * sizes[0]
    assert sizes[0] > 0.98 * GIGABYTE / block_bytes


def test_a_small_pool_loses_nothing(tiny_runner, monkeypatch):
    runner = tiny_runner("tiny_qwen3")
    block_bytes = runner.pool.data.nbytes // 101
    with pytest.raises(InvalidFieldError, match="memory_fraction"):
        blocks_that_fit(runner, monkeypatch, 0)
    other_bytes = next(
        size for size in range(0, GIGABYTE, block_bytes) if _fits(runner, monkeypatch, size)
    )
    sizes = [
        blocks_that_fit(runner, monkeypatch, other_bytes + i * block_bytes) for i in range(200)
    ]
    assert sizes == list(range(1, 201))


def _fits(runner, monkeypatch, memory_bytes: int) -> bool:
    try:
        return blocks_that_fit(runner, monkeypatch, memory_bytes) > 0
    except InvalidFieldError:
        return False

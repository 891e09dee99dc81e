"""What a start decides from the memory."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
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


def test_compiled_programs_are_kept_unless_the_user_has_decided(tmp_path: Path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        start._keep_compiled_programs(tmp_path / "ours")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ours")
        start._keep_compiled_programs(tmp_path / "another")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ours")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize(
    ("platform", "is_on", "is_kept"),
    [("gpu", True, True), ("tpu", True, True), ("gpu", False, False), ("cpu", True, False)],
)
def test_the_store_can_be_switched_off(platform, is_on, is_kept, tmp_path, monkeypatch):
    """B82: where a start from kept programs fails, another one must be possible."""
    monkeypatch.setattr(start, "ExecutableStore", lambda folder, devices: folder)
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", is_on)
        store = start._executable_store(tmp_path, mesh)  # pyright: ignore[reportArgumentType]
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert store == (tmp_path if is_kept else None)


def _fits(runner, monkeypatch, memory_bytes: int) -> bool:
    try:
        return blocks_that_fit(runner, monkeypatch, memory_bytes) > 0
    except InvalidFieldError:
        return False

"""Programs kept between starts: found again when all is the same, and only then."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.runner import executable_store
from jaxpaged.runner.executable_store import ExecutableStore, describe, prune, source_digest
from jaxpaged.runner.step import BatchState
from kernels_pallas.pool import KVPool

PROGRAM = Path(__file__).parents[1] / "helpers" / "start_from_store.py"
STATE = BatchState(token_ids=jnp.zeros(3, jnp.int32), block_tables=jnp.zeros((3, 2), jnp.int32))


def new_store(folder: Path) -> ExecutableStore:
    return ExecutableStore(folder / "programs", jax.devices()[:1])


def lower(factor: int = 3) -> jax.stages.Lowered:
    def step(state: BatchState, x: jax.Array) -> tuple[jax.Array, BatchState]:
        return x * factor, BatchState(state.token_ids + 1, state.block_tables)

    return jax.jit(step, donate_argnums=0).trace(STATE, np.zeros(5, np.int32)).lower()


def keep(store: ExecutableStore, description: str, lowered: Any = None) -> Any:
    with store.opened():
        return store.compile(description, lowered or lower(), None)


def load(store: ExecutableStore, description: str) -> Any:
    return store.load(description, (STATE, np.zeros(5, np.int32)))


def files(folder: Path) -> list[Path]:
    return sorted((folder / "programs").iterdir())


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_engine_starts_from_its_store(tmp_path, num_devices):
    """In another process; what would trace or lower a program raises there."""
    cold, warm = (start(tmp_path, num_devices, mode) for mode in ("cold", "warm"))
    assert cold["num_loads"] == 0 and cold["num_programs"] > 10
    assert warm["num_loads"] == warm["num_programs"] == cold["num_programs"]
    assert warm["token_ids"] == cold["token_ids"] and len(set(cold["token_ids"])) > 1
    # Negative control: of another size, so nothing fits that depends on it.
    other = start(tmp_path, num_devices, "other")
    assert 0 < other["num_loads"] < other["num_programs"]


def start(folder: Path, num_devices: int, mode: str) -> dict[str, Any]:
    flags = "--xla_force_host_platform_device_count=3"
    result = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "programs"), str(num_devices), mode],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_kept_program_answers_in_its_own_tree(tmp_path):
    keep(new_store(tmp_path), "step")
    program = load(new_store(tmp_path), "step")
    state = BatchState(token_ids=jnp.arange(3), block_tables=jnp.ones((3, 2), jnp.int32))
    product, after = program(state, np.arange(5, dtype=np.int32))
    assert product.tolist() == [0, 3, 6, 9, 12]
    assert isinstance(after, BatchState) and after.token_ids.tolist() == [1, 2, 3]
    assert state.token_ids.is_deleted(), "what was donated stays donated"
    with pytest.raises(TypeError, match="int32"):
        program(after, np.zeros(5, np.float32))


def test_another_description_is_another_program(tmp_path):
    store = new_store(tmp_path)
    keep(store, "step")
    assert load(store, "step") is not None and load(store, "step 2") is None


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_count(tmp_path, monkeypatch, name):
    keep(new_store(tmp_path), "step")
    monkeypatch.setenv(name, "--new")
    assert load(new_store(tmp_path), "step") is None


def test_settings_of_jax_count(tmp_path):
    keep(new_store(tmp_path), "step")
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert load(new_store(tmp_path), "step") is None
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert load(new_store(tmp_path), "step") is not None


def test_packages_of_cuda_count(tmp_path, monkeypatch):
    def installed(version: str) -> list[SimpleNamespace]:
        names = ("nvidia-cuda-nvcc", "pytest", None)  # without a name: half uninstalled
        return [SimpleNamespace(name=name, version=version) for name in names]

    monkeypatch.setattr(executable_store, "distributions", lambda: installed("1.0"))
    keep(new_store(tmp_path), "step")
    assert load(new_store(tmp_path), "step") is not None
    monkeypatch.setattr(executable_store, "distributions", lambda: installed("1.1"))
    assert load(new_store(tmp_path), "step") is None


def test_source_counts(tmp_path):
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / "a.py"
    digests = []
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        digests.append(source_digest(tmp_path))
    (tmp_path / "notes.txt").write_text("not a program")
    digests.append(source_digest(tmp_path))
    file.rename(tmp_path / "inner" / "b.py")
    digests.append(source_digest(tmp_path))
    assert digests[1] == digests[2] and len(set(digests)) == 3


def test_descriptions_tell_everything_apart():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    struct: Any = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    cut = NamedSharding(mesh, PartitionSpec("tensor"))
    arguments = [
        (struct((4, 2), jnp.int32),),
        (struct((2, 4), jnp.int32),),
        (struct((4, 2), jnp.float32),),
        (jax.ShapeDtypeStruct((4, 2), jnp.int32),),
        (jax.ShapeDtypeStruct((4, 2), jnp.int32, sharding=cut),),
        [struct((4, 2), jnp.int32)],
        (KVPool(struct((4, 2), jnp.int32), num_layers=2, head_dim=8),),
        (KVPool(struct((4, 2), jnp.int32), num_layers=4, head_dim=8),),
    ]
    assert len({describe(one) for one in arguments}) == len(arguments)
    assert describe(arguments[0]) == describe((struct((4, 2), jnp.int32),))


@pytest.mark.parametrize("cut", [0, 10, 32, 200, None], ids=str)
def test_a_damaged_file_is_a_miss(tmp_path, caplog, cut):
    caplog.set_level("INFO", "jaxpaged")
    store = new_store(tmp_path)
    keep(store, "step")
    (file,) = files(tmp_path)
    content = file.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    file.write_bytes(flipped if cut is None else content[:cut])
    assert load(store, "step") is None
    assert "is not used: ValueError: it is damaged" in caplog.text
    keep(store, "step")
    assert load(store, "step") is not None


def test_what_cannot_be_read_is_a_miss(tmp_path, caplog):
    """Whole, but not what this version writes."""
    caplog.set_level("INFO", "jaxpaged")
    store = new_store(tmp_path)
    keep(store, "step")
    (file,) = files(tmp_path)
    file.write_bytes(hashlib.sha256(b"other").digest() + b"other")
    assert load(store, "step") is None and "is not used: UnpicklingError" in caplog.text


def test_what_jax_found_in_its_own_cache_is_not_kept(tmp_path):
    """XLA may write such a program so that it loads and then fails."""
    compiled = lower().compile()

    def compile_it(hit: bool, options: None) -> jax.stages.Compiled:
        if hit:
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compiled

    store = new_store(tmp_path)
    for hit, num_files in ((True, 0), (False, 1)):
        lowered = SimpleNamespace(compile=partial(compile_it, hit))
        assert keep(store, "step", lowered) is compiled
        assert len(files(tmp_path)) == num_files


def test_what_cannot_be_kept_is_used_all_the_same(tmp_path, caplog):
    caplog.set_level("INFO", "jaxpaged")
    compiled = object()
    lowered = SimpleNamespace(compile=lambda options: compiled)
    assert keep(new_store(tmp_path), "step", lowered) is compiled
    assert "is not kept: AttributeError" in caplog.text and files(tmp_path) == []


def test_jax_writes_nothing_meanwhile(tmp_path):
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    with new_store(tmp_path).opened():
        assert getattr(jax.config, name) == float("inf")
    assert getattr(jax.config, name) == before != float("inf")


def test_engines_that_start_together_leave_the_setting_as_it_was(tmp_path):
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    is_open, may_close = threading.Event(), threading.Event()

    def open_another() -> None:
        with new_store(tmp_path).opened():
            is_open.set()
            may_close.wait()

    thread = threading.Thread(target=open_another)
    with new_store(tmp_path).opened():
        thread.start()
        is_open.wait(0.2)  # in vain: it waits for this one
    may_close.set()
    thread.join()
    assert getattr(jax.config, name) == before != float("inf")


def test_the_folder_is_ours_alone(tmp_path):
    new_store(tmp_path)
    folder = tmp_path / "programs"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="not ours alone to write to"):
        new_store(tmp_path)


def test_what_was_used_least_recently_goes(tmp_path):
    store = new_store(tmp_path)
    keep(store, "old")
    keep(store, "older")
    for age, file in enumerate(files(tmp_path)):
        os.utime(file, (1000 - age, 1000 - age))
    assert load(store, "old") is not None, "a use counts"
    size = sum(file.stat().st_size for file in files(tmp_path))
    prune(tmp_path / "programs", size)
    assert len(files(tmp_path)) == 2
    prune(tmp_path / "programs", size - 1)
    assert load(store, "old") is not None and load(store, "older") is None

"""From settings and files to a runner that is ready: weights, pool size, compiled programs."""

import logging
import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxpaged.checkpoint.protocol import Checkpoint
from jaxpaged.config import EngineConfig, ResolvedConfig
from jaxpaged.errors import InvalidFieldError
from jaxpaged.models.config import DTYPES, ModelConfig
from jaxpaged.runner.executable_store import ExecutableStore
from jaxpaged.runner.runner import Runner
from jaxpaged.runner.sharding import tensor_mesh
from jaxpaged.runner.weights import Weights, load_weights
from kernels_pallas.implementations import IMPLEMENTATIONS
from kernels_pallas.ops import max_blocks_per_row, pool_layout
from kernels_pallas.pool import pool_bytes_per_block

logger = logging.getLogger(__name__)

_CPU_MEMORY_BYTES = 4 * 2**30
# Leading bits that count of a pool's size that nobody chose: at most 1/128 of it is lost.
_POOL_SIZE_BITS = 8


def start_runner(config: EngineConfig, checkpoint: Checkpoint, cache_home: Path) -> Runner:
    """Loads the weights, sizes the pool and compiles.

    Args:
      cache_home: keeps compiled programs between starts, in `programs` and, those of JAX, in `xla`.

    Raises:
      JaxpagedError: the model cannot be loaded, or does not fit as configured.
    """
    _keep_compiled_programs(cache_home / "xla")
    model = ModelConfig.from_hf(checkpoint.config)
    dtype = config.dtype or _default_dtype(model)
    if dtype not in DTYPES:
        raise InvalidFieldError("dtype", f"{dtype=} must be one of {', '.join(DTYPES)}")
    _check_before_loading(config, model)
    if dtype == "float16" and model.dtype != dtype:
        logger.warning(
            "dtype=float16 holds no number above 65504, the checkpoint's %s does: where one comes "
            "up, requests end with NON_FINITE_LOGITS",
            model.dtype,
        )
    start = time.monotonic()
    mesh = tensor_mesh(config.tensor_parallel)
    weights = load_weights(
        model,
        checkpoint,
        dtype=dtype,
        mesh=mesh,
        seed=config.seed,
        random=config.load_format == "random",
    )
    megabytes = weights.num_bytes / 1e6
    logger.info("loaded %.0f MB of weights in %.1f s", megabytes, time.monotonic() - start)
    resolved = resolve_config(config, checkpoint.name, weights)
    start = time.monotonic()
    runner = _make_runner(weights, resolved)
    runner.warm_up(_executable_store(cache_home / "programs", mesh))
    num_programs, num_loaded = runner.num_programs
    logger.info(
        "%d blocks of %d tokens, context %d; ready to run after %.1f s: %d programs, "
        "%d of them kept from earlier starts",
        resolved.num_blocks,
        resolved.block_size,
        resolved.max_model_len,
        time.monotonic() - start,
        num_programs,
        num_loaded,
    )
    return runner


def _make_runner(weights: Weights, config: ResolvedConfig) -> Runner:
    try:
        return Runner(weights, config)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        raise InvalidFieldError(
            "num_blocks", f"num_blocks={config.num_blocks} does not fit the memory: lower it"
        ) from error


def _check_before_loading(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses at once what would fail after the weights were read."""
    if config.attention_impl not in (None, *IMPLEMENTATIONS):
        raise InvalidFieldError(
            "attention_impl",
            f"attention_impl={config.attention_impl!r} must be one of {', '.join(IMPLEMENTATIONS)}",
        )
    max_num_seqs, max_num_tokens = _step_sizes(config)
    if max_num_tokens < max_num_seqs:
        raise InvalidFieldError(
            "max_num_tokens", f"{max_num_tokens=} must be at least {max_num_seqs=}"
        )
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_model_len:
        logger.warning(
            "max_model_len=%d is more than the %d that the model was made for",
            wanted,
            model.max_model_len,
        )


def _step_sizes(config: EngineConfig) -> tuple[int, int]:
    """max_num_seqs and max_num_tokens, as given or by the platform."""
    on_cpu = jax.default_backend() == "cpu"
    max_num_seqs = config.max_num_seqs or (8 if on_cpu else 256)
    max_num_tokens = config.max_num_tokens or max(512 if on_cpu else 8192, max_num_seqs)
    return max_num_seqs, max_num_tokens


def resolve_config(config: EngineConfig, name: str, weights: Weights) -> ResolvedConfig:
    """Decides everything that the user left open, from the model and the memory that is left.

    Raises:
      InvalidFieldError: a field is out of range, or `max_model_len` does not fit the pool.
    """
    model = weights.structure.config
    max_num_seqs, max_num_tokens = _step_sizes(config)
    wanted_len = config.max_model_len or model.max_model_len
    wanted_len = _len_of_tables(config, wanted_len, max_num_seqs, max_num_tokens)
    num_blocks = config.num_blocks or _num_blocks_that_fit(config, weights, max_num_tokens)
    # More could never be in use at once, and an idle cache of that size is size enough.
    if config.num_blocks is None:
        num_blocks = min(num_blocks, max_num_seqs * -(-wanted_len // config.block_size))
    _check_index_range(num_blocks, config.block_size, model.num_layers)
    return ResolvedConfig(
        model=name,
        vocab_size=model.vocab_size,
        platform=weights.structure.mesh.devices.flat[0].platform,
        dtype=weights.structure.dtype,
        kv_dtype=weights.structure.dtype,
        max_model_len=_fitting_len(config, wanted_len, num_blocks),
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        attention_impl=config.attention_impl,
        tensor_parallel=config.tensor_parallel,
        scheduling=config.scheduling,
        overlap=config.overlap,
    )


def _len_of_tables(
    config: EngineConfig, wanted_len: int, max_num_seqs: int, max_num_tokens: int
) -> int:
    """The context length as wanted if block tables may be that wide; lowered if nobody asked."""
    width = max_blocks_per_row(
        config.attention_impl, num_rows=max_num_seqs, num_tokens=max_num_tokens
    )
    if width is None or wanted_len <= width * config.block_size:
        return wanted_len
    longest = max(width, 0) * config.block_size
    if config.max_model_len is not None or longest == 0:
        raise InvalidFieldError(
            "max_model_len",
            f"max_model_len={wanted_len} and max_num_seqs={max_num_seqs} need block tables that "
            f"the attention kernels cannot hold: lower max_model_len to {longest}, or lower "
            f"max_num_seqs, or raise block_size={config.block_size}",
        )
    logger.warning(
        "max_model_len lowered from %d to %d: block tables of %d sequences cannot be wider; "
        "fewer sequences or a larger block_size raise it",
        wanted_len,
        longest,
        max_num_seqs,
    )
    return longest


def _check_index_range(num_blocks: int, block_size: int, num_layers: int) -> None:
    """Slots, and rows of the pool (a block of a layer each), are counted in int32 on the device."""
    limit = (2**31 - 1) // max(block_size, num_layers) - 1
    if num_blocks > limit:
        raise InvalidFieldError("num_blocks", f"num_blocks={num_blocks} must be at most {limit}")


def _fitting_len(config: EngineConfig, wanted_len: int, num_blocks: int) -> int:
    """The context length as wanted if the pool can hold it; lowered if nobody asked for it."""
    room = num_blocks * config.block_size
    if wanted_len <= room:
        return wanted_len
    if config.max_model_len is not None:
        raise InvalidFieldError(
            "max_model_len",
            f"max_model_len={config.max_model_len} needs "
            f"{-(-wanted_len // config.block_size)} blocks of block_size={config.block_size}, but "
            f"the pool has {num_blocks}: lower max_model_len to {room}, or raise num_blocks or "
            f"memory_fraction",
        )
    logger.warning("max_model_len lowered from %d to %d: the pool's size", wanted_len, room)
    return room


def _num_blocks_that_fit(config: EngineConfig, weights: Weights, max_num_tokens: int) -> int:
    """Blocks for what the weights and the largest step leave of the memory fraction."""
    model = weights.structure.config
    block_bytes = pool_bytes_per_block(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.head_dim,
        dtype=weights.structure.dtype,
        layout=pool_layout(config.attention_impl),
    )
    # A step's widest arrays: the MLP's and the head's, a few of each alive at once, in float32.
    step_bytes = 4 * 4 * (max_num_tokens * model.intermediate_size + 8 * model.vocab_size)
    # What each device keeps for sampling options (8), logits of steps of every size (which double,
    # so 2 * 4), and a few copies of all rows while they draw.
    max_num_seqs, _ = _step_sizes(config)
    row_bytes = 8 + 2 * 4 + 3 * 4
    sampling_bytes = (max_num_seqs + 1) * model.vocab_size * row_bytes * config.tensor_parallel
    limit = _memory_bytes() * config.tensor_parallel * config.memory_fraction
    other_bytes = weights.num_bytes + step_bytes + sampling_bytes
    num_blocks = int((limit - other_bytes) // block_bytes)
    if num_blocks < 1:
        raise InvalidFieldError(
            "memory_fraction",
            f"memory_fraction={config.memory_fraction} gives {limit / 1e9:.2f} GB, but weights and "
            f"a step take {other_bytes / 1e9:.2f} GB: raise memory_fraction, "
            f"set num_blocks, or take a smaller model",
        )
    # why rounded: a GPU's limit is a fraction of what was free at the start, and a pool of another
    # size by one block needs every program compiled anew
    return num_blocks - num_blocks % (1 << max(0, num_blocks.bit_length() - _POOL_SIZE_BITS))


def _memory_bytes() -> int:
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats else _CPU_MEMORY_BYTES


def _default_dtype(model: ModelConfig) -> str:
    return "float32" if jax.default_backend() == "cpu" else model.dtype


def _keep_compiled_programs(folder: Path) -> None:
    """Turns JAX's persistent compilation cache on, unless the user has set it up."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _executable_store(folder: Path, mesh: Mesh) -> ExecutableStore | None:
    """Where accelerators keep programs.

    Not so the CPU: there XLA's programs are for the very features of one processor, implementations
    may call back into Python, and lowering is quick. Nobody keeps any where JAX's own cache is
    switched off: JAX_ENABLE_COMPILATION_CACHE=0.
    """
    devices = mesh.devices.flatten().tolist()
    if devices[0].platform == "cpu" or not jax.config.jax_enable_compilation_cache:
        return None
    try:
        return ExecutableStore(folder, devices)
    except OSError as error:
        logger.warning("compiled programs are not kept: %s", error)
        return None

"""The Hopper kernels in Pallas's Mosaic GPU interpreter, with races reported, and planted races.

The interpreter runs every simulated thread as an XLA program of its own, whose callbacks may wait
at a barrier for another's. They wait on threads of XLA's CPU pool, which all programs share, and
one more waits for the simulated threads to end. If nobody is left in the pool to run what they wait
for, they wait for ever. So the pool must have more threads than can wait (`MOST_WAITING`): conftest
sets its size, whatever the number of cores.
"""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import pytest
from helpers.attention_cases import AttentionCase
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import attention_hopper
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.pool import KVPool
from kernels_pallas.prefill_hopper import paged_prefill
from kernels_pallas.prefill_plan import make_prefill_plan
from kernels_pallas.tuning import HopperDecodeTuning, HopperPrefillTuning, HopperTuning

# What the interpreter says of a race, and JAX 0.11 of a barrier that completes unobserved.
_REPORTS = ("RACE DETECTED", "no threads observed phase")

# Four simulated threads: two workers of the decode kernel, each with its loader; and their caller.
MOST_WAITING = 5


def small_tuning(head_dim: int) -> HopperTuning:
    """As on a device of two multiprocessors."""
    if head_dim > 128:
        return HopperTuning(
            HopperDecodeTuning(64, 2, num_workers=2),
            HopperPrefillTuning(64, 2, q_slots=1, num_programs=2),
        )
    return HopperTuning(
        HopperDecodeTuning(64, 2, num_workers=4), HopperPrefillTuning(num_programs=2)
    )


def interpret(
    case: AttentionCase, options: AttentionOptions, sinks: jax.Array | None = None
) -> tuple[jax.Array, KVPool]:
    """Runs the kernels. A race raises or is printed: see `reports_race`."""
    tuning = small_tuning(case.pool.head_dim)
    with mock.patch.object(gpu_callbacks, "wgmma", _wgmma_with_checked_reads):
        return jax.block_until_ready(_run(case.args, sinks, options=options, tuning=tuning))


def _attend(args, sinks, *, options, tuning):
    q, k_new, v_new, pool, layer, metadata = args
    params = plgpu.InterpretGPUParams(detect_races=True)
    return attention_hopper.paged_attention(
        q, k_new, v_new, pool, layer, metadata, options, sinks, tuning, interpret=params
    )


@contextmanager
def traced_anew() -> Generator[None]:
    """Where something that kernels are traced with is another: no trace comes in, none goes out."""
    _run.clear_cache()
    try:
        yield
    finally:
        _run.clear_cache()


def interpret_prefill(
    q: jax.Array,
    case: AttentionCase,
    options: AttentionOptions,
    sinks: jax.Array | None,
    tuning: HopperPrefillTuning,
) -> jax.Array:
    """Runs the prefill kernel alone, over a pool that has the step's keys and values already.

    Args:
      q: [num_terms, num_tokens, num_q_heads, head_dim], instead of the case's.

    Returns:
      [num_terms, num_tokens, num_q_heads, head_dim]; padding tokens hold anything.
    """
    with mock.patch.object(gpu_callbacks, "wgmma", _wgmma_with_checked_reads):
        arrays = case.pool, case.layer, case.metadata
        out = _run_prefill(q, *arrays, sinks, options=options, tuning=tuning)
        return jax.block_until_ready(out)


def _prefill(q, pool, layer, metadata, sinks, *, options, tuning):
    out = paged_prefill(
        q,
        pool,
        pool.first_row(layer),
        metadata.block_tables,
        metadata.kv_lens,
        make_prefill_plan(metadata, tuning.q_tile),
        options,
        sinks,
        tuning,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    return out[:, : q.shape[1]]


_run_prefill: Any = jax.jit(_prefill, static_argnames=("options", "tuning"))
_run: Any = jax.jit(_attend, static_argnames=("options", "tuning"))
_wgmma: Any = gpu_callbacks.wgmma


@gpu_callbacks.fail_on_exception
def _wgmma_with_checked_reads(*, thread: Any, **rest: Any) -> Any:
    """JAX's own does not look for races where the matrix unit reads shared memory.

    It reads as TMA does: what threads wrote themselves, it sees after `commit_smem`.
    """
    memory = gpu_callbacks._get_shared_memory()
    with memory.lock:
        memory.clocks[thread].inc(memory.thread_to_vc_position(thread))
        clock = memory.clocks[thread].async_smem_clock.copy()
    for operand in ("a", "b"):
        key = HostAllocationKey.from_array(rest[f"{operand}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(rest[f"{operand}_transforms"])
        part = memory.access(key, jax.tree.map(int, transforms))
        gpu_callbacks.get_races().check_read(thread, clock, key, part, rest["source_info"])
    return _wgmma(thread=thread, **rest)


def reports_race(run: Callable[[], Any], capsys: Any) -> bool:
    """Whether a run reports a race or a missing wait: JAX 0.11 prints races, 0.12 raises them."""
    capsys.readouterr()
    try:
        run()
    except Exception as error:
        # The interpreter is of no use after an exception until its state is reset.
        reset_gpu_interpret_mode_state()
        if not any(report in str(error) for report in _REPORTS):
            raise
        return True
    return _REPORTS[0] in capsys.readouterr().out


def never_wait_for(barrier: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every wait for one barrier out of a kernel.

    Args:
      barrier: a parameter of the module's `_program`, or a field of its `refs`.
    """
    program, wait = module._program, plgpu.barrier_wait

    def broken(*arguments, **settings):
        parameters = inspect.signature(program).bind(*arguments, **settings).arguments
        refs = vars(parameters["refs"]) if "refs" in parameters else parameters

        def wait_for_others(ref):
            if getattr(ref, "ref", ref) is not refs[barrier]:
                wait(ref)

        monkeypatch.setattr(plgpu, "barrier_wait", wait_for_others)
        program(*arguments, **settings)
        monkeypatch.setattr(plgpu, "barrier_wait", wait)

    monkeypatch.setattr(module, "_program", broken)
    # What was traced before has the wait.
    _run.clear_cache()

"""The Hopper kernels in Pallas's Mosaic GPU interpreter, with races reported, and planted races."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import pytest
from helpers.attention_cases import AttentionCase
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import attention_hopper
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.pool import KVPool
from kernels_pallas.tuning import HopperDecodeTuning, HopperPrefillTuning, HopperTuning

_REPORT = "RACE DETECTED"


def small_tuning(head_dim: int) -> HopperTuning:
    """As on a device of two multiprocessors."""
    if head_dim > 128:
        return HopperTuning(
            HopperDecodeTuning(64, 2, workers=1, num_programs=2),
            HopperPrefillTuning(64, 2, attenders=1, q_slots=1, num_programs=2),
        )
    return HopperTuning(
        HopperDecodeTuning(64, 2, workers=2, num_programs=2), HopperPrefillTuning(num_programs=2)
    )


def interpret(
    case: AttentionCase, options: AttentionOptions, sinks: jax.Array | None = None
) -> tuple[jax.Array, KVPool]:
    """Runs the kernels. A race raises or is printed: see `reports_race`."""
    tuning = small_tuning(case.pool.head_dim)
    return jax.block_until_ready(_run(case.args, sinks, options=options, tuning=tuning))


@functools.partial(jax.jit, static_argnames=("options", "tuning"))
def _run(args, sinks, *, options, tuning):
    params = plgpu.InterpretGPUParams(detect_races=True)
    return attention_hopper.paged_attention(*args, options, sinks, tuning, interpret=params)


def reports_race(run: Callable[[], Any], capsys: Any) -> bool:
    """Whether a run reports a race: JAX 0.11 prints it, 0.12 raises."""
    capsys.readouterr()
    try:
        run()
    except Exception as error:
        # The interpreter is of no use after an exception until its state is reset.
        reset_gpu_interpret_mode_state()
        if _REPORT not in str(error):
            raise
        return True
    return _REPORT in capsys.readouterr().out


def never_wait_for(barrier: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every wait for one barrier out of a kernel.

    Args:
      barrier: the parameter's name in the module's `_program`.
    """
    program, wait = module._program, plgpu.barrier_wait
    index = list(inspect.signature(program).parameters).index(barrier)

    def broken(*refs, **settings):
        def wait_for_others(ref):
            if getattr(ref, "ref", ref) is not refs[index]:
                wait(ref)

        monkeypatch.setattr(plgpu, "barrier_wait", wait_for_others)
        program(*refs, **settings)
        monkeypatch.setattr(plgpu, "barrier_wait", wait)

    monkeypatch.setattr(module, "_program", broken)
    # What was traced before has the wait.
    _run.clear_cache()

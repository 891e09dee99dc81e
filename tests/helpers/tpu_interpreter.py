"""The TPU kernels in Pallas's interpreter, with races reported."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from helpers.attention_cases import AttentionCase, with_layout
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import attention_tpu
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.pool import KVPool
from kernels_pallas.tuning import TPUTuning

DmaMode = Literal["eager", "on_wait"]

_REPORT = "RACE DETECTED"


def interpret(
    case: AttentionCase,
    options: AttentionOptions,
    tuning: TPUTuning,
    *,
    dma_mode: DmaMode,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPool]:
    """Runs the kernels. A race raises or is printed: see `reports_race`.

    Args:
      dma_mode: whether a copy happens when it starts or when it is waited for; memory that nobody
        has written is NaN.
    """
    q, k_new, v_new, pool, layer, metadata = case.args
    arrays = q, k_new, v_new, with_layout(pool, "tpu"), layer, metadata
    out = _run(arrays, sinks, options=options, tuning=tuning, dma_mode=dma_mode)
    return jax.block_until_ready(out)


@functools.partial(jax.jit, static_argnames=("options", "tuning", "dma_mode"))
def _run(arrays, sinks, *, options, tuning, dma_mode):
    # why so many: copies that share a clock entry hide each other's races
    params = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=dma_mode, vector_clock_size=1024
    )
    q, k_new, v_new, pool, layer, metadata = arrays
    return attention_tpu.paged_attention(
        q, k_new, v_new, pool, layer, metadata, options, sinks, tuning, interpret=params
    )


def reports_race(run: Callable[[], Any], capsys: Any) -> bool:
    """Whether a run reports a race: JAX 0.11 prints it, 0.12 raises."""
    capsys.readouterr()
    try:
        run()
    except Exception as error:
        # The interpreter is of no use after an exception until its state is reset.
        pltpu.reset_tpu_interpret_mode_state()
        if _REPORT not in str(error):
            raise
        return True
    return _REPORT in capsys.readouterr().out

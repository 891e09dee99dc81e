"""What is done to logits before a token is drawn, in plain NumPy: float64, one row, loops."""

from collections.abc import Sequence

import numpy as np

from jaxpaged.sampling_params import SamplingParams


def adjusted_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """Allowed ids -> min_tokens -> logit_bias -> penalties."""
    logits = logits.astype(np.float64).copy()
    for token_id in range(len(logits)):
        is_allowed = params.allowed_token_ids is None or token_id in params.allowed_token_ids
        is_too_early = len(output) < (params.min_tokens or 0) and token_id in end_token_ids
        if not is_allowed or is_too_early:
            logits[token_id] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += min(100.0, max(-100.0, bias))
    repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
    for token_id in {*prompt, *output}:
        value = logits[token_id]
        logits[token_id] = value / repetition if value > 0 else value * repetition
    for token_id in set(output):
        logits[token_id] -= params.presence_penalty or 0.0
        logits[token_id] -= (params.frequency_penalty or 0.0) * list(output).count(token_id)
    return logits

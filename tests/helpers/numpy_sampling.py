"""What the sampling options mean, in plain NumPy: float64, one row, sorted lists."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxpaged.sampling_params import SamplingParams


def adjusted_logits(
    logits: np.ndarray,
    *,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    end_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Collection[int] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> np.ndarray:
    """What the next token is drawn from, after these prompt and output tokens.

    Order: allowed ids -> min_tokens mask -> logit_bias -> repetition -> frequency and presence.

    Args:
      end_token_ids: EOS and stop ids.
    """
    adjusted = [float(logit) for logit in logits]
    for i in range(len(adjusted)):
        is_banned = i in end_token_ids and len(output_token_ids) < min_tokens
        if is_banned or (allowed_token_ids is not None and i not in allowed_token_ids):
            adjusted[i] = -np.inf
    for i, bias in (logit_bias or {}).items():
        adjusted[i] += bias
    for i in {*prompt_token_ids, *output_token_ids}:
        if adjusted[i] > 0:
            adjusted[i] /= repetition_penalty
        else:
            adjusted[i] *= repetition_penalty
    for i in set(output_token_ids):
        adjusted[i] -= frequency_penalty * list(output_token_ids).count(i) + presence_penalty
    return np.array(adjusted, np.float64)


def adjusted_for(
    params: SamplingParams,
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    end_token_ids: Collection[int] = (),
) -> np.ndarray:
    """`adjusted_logits` with the options of a request; what is unset is off."""
    biases = params.logit_bias or {}
    return adjusted_logits(
        logits,
        prompt_token_ids=prompt,
        output_token_ids=output,
        end_token_ids=end_token_ids,
        min_tokens=params.min_tokens or 0,
        logit_bias={i: min(100.0, max(-100.0, bias)) for i, bias in biases.items()},
        allowed_token_ids=params.allowed_token_ids,
        repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
    )


def logprobs_of(
    logits: np.ndarray, chosen: int, k: int
) -> tuple[float, int, list[int], list[float]]:
    """The chosen token's log-probability and rank, then the k best ids and theirs.

    Best first, of equals the lower id; fewer than k where the vocabulary has no more.
    """
    shifted = logits.astype(np.float64) - np.float64(logits.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = order[:k]
    chosen_rank = order.index(chosen) + 1
    return float(logprobs[chosen]), chosen_rank, best, [float(logprobs[i]) for i in best]


def kept_ids(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> set[int]:
    """Ids that may be drawn: temperature -> min_p -> top_k -> top_p, ties to the lower id."""
    probabilities = softmax(logits, temperature)
    # Best first; a stable sort keeps the lower id before its equals.
    order = [int(i) for i in np.argsort(-logits, kind="stable")]
    order = [i for i in order if probabilities[i] >= min_p * probabilities.max()]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        wanted = top_p * probabilities[order].sum()
        kept, so_far = [], 0.0
        for i in order:
            if kept and so_far >= wanted:
                break
            kept.append(i)
            so_far += probabilities[i]
        order = kept
    return set(order)


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    shifted = (logits.astype(np.float64) - np.float64(logits.max())) / temperature
    weights = np.exp(shifted)
    return weights / weights.sum()


def expected_distribution(logits: np.ndarray, **options: float) -> np.ndarray:
    """The probability of every id to be drawn."""
    kept = kept_ids(logits, **options)  # type: ignore[arg-type]
    probabilities = softmax(logits, options.get("temperature", 1.0))
    probabilities[[i for i in range(len(logits)) if i not in kept]] = 0.0
    return probabilities / probabilities.sum()

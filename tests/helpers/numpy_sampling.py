"""What the sampling options mean, in plain NumPy: float64, one row, sorted lists."""

import numpy as np


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

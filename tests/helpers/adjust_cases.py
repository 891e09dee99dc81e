"""Rows of logits with options that change them, for the device and for the NumPy reference."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.numpy_sampling import adjusted_logits

from jaxpaged.runner.adjust import adjustments_row

VOCAB = 211
# Ids are drawn for each row where a value is a function of (rng, number of output tokens).
OPTIONS: dict[str, list[Any]] = {
    "repetition_penalty": [1e6, 1.3, 0.5, 1e-3],
    "presence_penalty": [2.0, -2.0, 0.7],
    "frequency_penalty": [2.0, -2.0, 0.1],
    "logit_bias": [
        lambda rng, _: dict(zip(ids_of(rng, 9), rng.uniform(-100, 100, 9), strict=True)),
        lambda rng, _: {0: 100.0, VOCAB - 1: -100.0, 7: 0.0},
    ],
    "allowed_token_ids": [
        lambda rng, _: ids_of(rng, int(rng.integers(1, VOCAB))),
        lambda rng, _: [0, VOCAB - 1],
        lambda rng, _: [int(rng.integers(VOCAB))],
    ],
    # Just reached, one missing, far off.
    "min_tokens": [lambda rng, num_output: num_output + int(rng.integers(2)), 100],
}


def ids_of(rng: np.random.Generator, count: int) -> list[int]:
    return [int(i) for i in rng.permutation(VOCAB)[:count]]


@dataclass
class Case:
    """One row: its logits, what came before, and its options, as the reference takes them."""

    logits: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def want(self, **changes: Any) -> np.ndarray:
        return adjusted_logits(self.logits, **(self.options | changes))


def random_logits(rng: np.random.Generator) -> np.ndarray:
    """Smooth, with ties, with -inf, +-60, huge, tiny, all equal."""
    smooth = rng.normal(0, 3, VOCAB)
    kinds = [
        smooth,
        rng.integers(-3, 4, VOCAB) * 0.75,
        np.where(rng.random(VOCAB) < 0.4, -np.inf, smooth),
        np.where(rng.random(VOCAB) < 0.5, 60.0, -60.0),
        smooth * 1e30,
        smooth * 1e-30,
        np.full(VOCAB, smooth[0]),
        np.where(np.arange(VOCAB) < VOCAB - 19, smooth, -np.inf),  # padding columns
    ]
    return kinds[rng.integers(len(kinds))].astype(np.float32)


def random_case(rng: np.random.Generator, names: tuple[str, ...]) -> Case:
    """A row with each of these options, and tokens that it repeats."""
    favourites = [0, VOCAB - 1, *ids_of(rng, 12)]
    options: dict[str, Any] = {
        name: [int(i) for i in rng.choice(favourites, rng.integers(30))]
        for name in ("prompt_token_ids", "output_token_ids")
    }
    options["end_token_ids"] = ids_of(rng, int(rng.integers(5)))
    for name in names:
        value = OPTIONS[name][rng.integers(len(OPTIONS[name]))]
        options[name] = value(rng, len(options["output_token_ids"])) if callable(value) else value
    if "logit_bias" in options:
        # The device has 32 bits, and so does the wire.
        options["logit_bias"] = {i: float(np.float32(b)) for i, b in options["logit_bias"].items()}
    return Case(random_logits(rng), options)


def adjustments_of(cases: list[Case]) -> tuple[jax.Array, jax.Array]:
    """A row of tokens and one of biases for each case."""
    rows = [
        adjustments_row(
            VOCAB,
            prompt_token_ids=case.options.get("prompt_token_ids", []),
            output_token_ids=case.options.get("output_token_ids", []),
            end_token_ids=case.options.get("end_token_ids", []),
            logit_bias=case.options.get("logit_bias", {}),
            allowed_token_ids=case.options.get("allowed_token_ids"),
        )
        for case in cases
    ]
    tokens, biases = zip(*rows, strict=True)
    return jnp.asarray(np.stack(tokens)), jnp.asarray(np.stack(biases))


def logits_of(cases: list[Case]) -> jax.Array:
    return jnp.asarray(np.stack([case.logits for case in cases]))

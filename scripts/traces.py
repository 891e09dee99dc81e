"""Requests that scripts time: prompts of random token ids, and how many tokens to answer with."""

import random

Trace = list[tuple[list[int], int]]


def mixed_trace(num_requests: int = 1000, vocab_size: int = 151936) -> Trace:
    """(prompt, max_tokens) with log-normal lengths; the same ones in every run.

    The 1000 requests of the default have 239,460 tokens in and 245,845 out.
    """
    rng = random.Random(7)
    trace = []
    for _ in range(num_requests):
        num_prompt = min(2000, max(8, int(rng.lognormvariate(5.0, 1.0))))
        max_tokens = min(800, max(8, int(rng.lognormvariate(5.2, 0.8))))
        prompt = [rng.randrange(100, min(150000, vocab_size)) for _ in range(num_prompt)]
        trace.append((prompt, max_tokens))
    return trace


def random_trace(lengths: list[int], max_tokens: int, vocab_size: int) -> Trace:
    """Prompts of these lengths, other ones in every run, so that none is found in a cache."""
    rng = random.Random()
    return [([rng.randrange(100, vocab_size) for _ in range(n)], max_tokens) for n in lengths]

"""The sizes a step is compiled for."""

from dataclasses import dataclass

from jaxpaged.step_plan import StepPlan

MANY_TOKENS = 2048  # from here on steps with prompts grow by two


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled size. `num_tokens == num_rows` means that no row computes more than one token.

    Attributes:
      num_tokens: tokens of the padded step.
      num_rows: rows of the padded step, and tokens that it can draw.
    """

    num_tokens: int
    num_rows: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_rows


def make_buckets(*, max_num_seqs: int, max_num_tokens: int, on_cpu: bool = True) -> list[Bucket]:
    """All buckets of an engine, smallest first.

    Decode buckets grow by two up to `max_num_seqs`. Steps with prompts always have `max_num_seqs`
    rows and grow in tokens alone, so that sizes add up instead of multiplying. On accelerators,
    where compiling costs much, there are fewer: none under 8 rows (a matrix unit's least), and
    steps with prompts grow by four, for the scheduler fills them; from thousands of tokens on by
    two, for the fewer tokens, the less a product's tiles fill all multiprocessors.
    """
    decode = [Bucket(rows, rows) for rows in _growing(1 if on_cpu else 8, max_num_seqs, 2)]
    first = max(16, 1 << max_num_seqs.bit_length())  # more tokens than rows: never a decode bucket
    sizes = _growing(first, max(first, max_num_tokens), 2 if on_cpu else 4)
    if not on_cpu:
        many = [size for size in sizes if size >= MANY_TOKENS]
        sizes = [size for size in sizes if size < MANY_TOKENS]
        sizes += _growing(many[0], many[-1], 2) if many else []
    prefill = [Bucket(num_tokens, max_num_seqs) for num_tokens in sizes]
    return sorted(decode + prefill)


def pick_bucket(buckets: list[Bucket], plan: StepPlan) -> Bucket:
    """The smallest bucket that holds the plan."""
    num_rows, num_samples = len(plan.rows), len(plan.sample_rows)
    # A decode step does not keep the hidden states that prompt log-probabilities are made from.
    is_decode = plan.num_tokens == num_rows and not plan.prompt_chunks
    for bucket in buckets:
        fits = plan.num_tokens <= bucket.num_tokens and num_samples <= bucket.num_rows
        if fits and num_rows <= bucket.num_rows and (is_decode or not bucket.is_decode):
            return bucket
    raise AssertionError(f"no bucket holds {plan.num_tokens} tokens in {num_rows} rows")


def _growing(first: int, last: int, factor: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]

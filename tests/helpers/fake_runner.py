"""A runner without a device: it obeys step plans, and refuses what a device would get wrong.

Each slot of its pool holds a token, its position and a digest of all tokens up to it, as a model's
keys and values do. Whatever is drawn depends on that digest, read back through the row's block
table: a wrong table, copy, position or shared block changes the tokens.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, log

from jaxpaged.logprobs import unpack_best
from jaxpaged.request import EngineRequest
from jaxpaged.scheduler.beam_search import BeamSearch, Hypothesis
from jaxpaged.step_plan import RowStart, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Slot:
    token_id: int
    position: int
    digest: int


class FakeRunner:
    """Runs each plan when it is dispatched; `collect` hands the tokens out later.

    Args:
      non_finite_token_id: drawing this id reports non-finite logits instead.
    """

    step_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int = 7,
        non_finite_token_id: int | None = None,
    ):
        self.num_computed_tokens = 0
        self.num_copies = 0
        self.num_steps = 0
        self.pool: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._non_finite_token_id = non_finite_token_id
        self._options: list[RowStart | None] = [None] * max_num_seqs
        self._tables: list[dict[int, int]] = [{} for _ in range(max_num_seqs)]
        self._device_tokens: list[int | None] = [None] * max_num_seqs

    def dispatch(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        assert plan.step_id == self.num_steps, "plans come in order, none is left out"
        self._check_shape(plan)
        self._start_rows(plan)
        self._copy(plan)
        self._check_writers(plan)
        self._compute(plan)
        return replace(self._draw(plan), prompt_logprobs=self._score(plan))

    def draw(self, handle: StepResult, masks: object) -> None:
        """Everything was drawn already; masks change nothing here."""

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def _check_shape(self, plan: StepPlan) -> None:
        num_rows, num_decodes = len(plan.rows), plan.num_decode_rows
        assert num_rows and len(plan.q_lens) == len(plan.kv_lens) == num_rows
        assert plan.q_lens[:num_decodes] == [1] * num_decodes, "decode rows come first"
        assert sum(plan.q_lens[num_decodes:]) == len(plan.token_ids)
        assert all(0 < q <= kv for q, kv in zip(plan.q_lens, plan.kv_lens, strict=True))
        for rows in (plan.rows, plan.sample_rows, [start.row for start in plan.starts]):
            assert len(set(rows)) == len(rows), f"a row twice in {rows}"
            assert all(0 <= row < len(self._tables) for row in rows), f"row out of range in {rows}"
        assert len(plan.sample_sources) == len(plan.sample_rows)
        assert all(0 <= source < num_rows for source in plan.sample_sources)

    def _start_rows(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._options[start.row] = start
            self._tables[start.row] = {}
            self._device_tokens[start.row] = None
        places = [(row, idx) for row, idx, _ in plan.table_updates]
        assert len(set(places)) == len(places), "one place of a table is written twice"
        for row, idx, block in plan.table_updates:
            self._check_block(block)
            self._tables[row][idx] = block

    def _copy(self, plan: StepPlan) -> None:
        sources = {source for source, _ in plan.copies}
        destinations = [destination for _, destination in plan.copies]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        assert not sources & set(destinations), "a copy's destination is a source"
        for source, destination in plan.copies:
            self._check_block(source)
            self._check_block(destination)
            self.pool[destination] = list(self.pool[source])
        self.num_copies += len(plan.copies)

    def _check_writers(self, plan: StepPlan) -> None:
        """Raises unless every block that is written is in one table of this step only."""
        size, holders, written = self._block_size, {}, set()
        for row, q_len, kv_len in zip(plan.rows, plan.q_lens, plan.kv_lens, strict=True):
            for idx in range(-(-kv_len // size)):
                block = self._block(row, idx)
                holders.setdefault(block, set()).add(row)
                if (idx + 1) * size > kv_len - q_len:
                    written.add(block)
        for block in written:
            assert len(holders[block]) == 1, f"block {block} is written and in two tables"

    def _compute(self, plan: StepPlan) -> None:
        unread = iter(plan.token_ids)
        for at, (row, q_len, kv_len) in enumerate(
            zip(plan.rows, plan.q_lens, plan.kv_lens, strict=True)
        ):
            if at < plan.num_decode_rows:
                token = plan.known_tokens.get(at, self._device_tokens[row])
                assert token is not None, f"row {row} decodes, but nothing was drawn for it"
                tokens = [token]
            else:
                tokens = [next(unread) for _ in range(q_len)]
            digest = self._read_prefix(row, kv_len - q_len)
            for position, token in enumerate(tokens, kv_len - q_len):
                digest = hash((digest, token))
                block = self._block(row, position // self._block_size)
                self.pool[block][position % self._block_size] = Slot(token, position, digest)
            self.num_computed_tokens += q_len

    def _draw(self, plan: StepPlan) -> StepResult:
        drawn, is_finite, records = [], [], []
        for source, sample_row in zip(plan.sample_sources, plan.sample_rows, strict=True):
            digest = self._read_prefix(plan.rows[source], plan.kv_lens[source])
            options = self._options[sample_row]
            assert options is not None, f"row {sample_row} draws, but was never started"
            seed = options.seed if options.params.temperature else None
            token = draw_token(digest, seed, self._vocab_size)
            self._device_tokens[sample_row] = token
            drawn.append(token)
            is_finite.append(token != self._non_finite_token_id)
            num_best = options.params.logprobs
            records.append(
                b"" if num_best is None else record(digest, token, num_best, self._vocab_size)
            )
        return StepResult(drawn, is_finite, records if any(records) else None)

    def _score(self, plan: StepPlan) -> list[bytes]:
        """A record for each prompt token that is asked for: itself, and the token before it."""
        assert all(idx >= plan.num_decode_rows for idx in (c.first_idx for c in plan.prompt_chunks))
        scored = []
        for chunk in plan.prompt_chunks:
            first = chunk.first_idx - plan.num_decode_rows
            before = plan.token_ids[first : first + len(chunk.token_ids)]
            pairs = zip(chunk.token_ids, before, strict=True)
            scored.append(b"".join(struct.pack("=fi", *pair) for pair in pairs))
        return scored

    def _read_prefix(self, row: int, num_tokens: int) -> int:
        """Reads all slots of a row's prefix through its table; returns the last one's digest."""
        digest = 0
        for position in range(num_tokens):
            block = self._block(row, position // self._block_size)
            slot = self.pool[block][position % self._block_size]
            assert slot is not None, f"{row=} reads {position=} in {block=}: never written"
            assert slot.position == position, f"{row=} {position=} {block=} holds {slot}"
            digest = hash((digest, slot.token_id))
            assert slot.digest == digest, f"{row=} {position=} {block=}: of another prefix"
        return digest

    def _block(self, row: int, idx: int) -> int:
        block = self._tables[row].get(idx)
        assert block is not None, f"{row=} has no block at {idx=}"
        return block

    def _check_block(self, block: int) -> None:
        assert 0 < block < len(self.pool), f"{block=} is the null block or out of range"


def draw_token(digest: int, seed: int | None, vocab_size: int) -> int:
    """The fake model: the next token after a prefix; `seed` None is greedy."""
    return _noise(digest, -1 if seed is None else seed + 1) * vocab_size >> 64


def record(digest: int, token_id: int, num_best: int, vocab_size: int) -> bytes:
    """The fake model's log-probabilities after a prefix, packed as the runner does it."""
    logits = [_noise(digest, -3 - i) / 2**62 for i in range(vocab_size)]
    total = log(sum(map(exp, logits)))
    ranked = sorted(range(vocab_size), key=lambda i: (-logits[i], i))
    packed = struct.pack("=fi", logits[token_id] - total, 1 + ranked.index(token_id))
    for i in ranked[:num_best]:
        packed += struct.pack("=if", i, logits[i] - total)
    return packed


def _noise(digest: int, salt: int) -> int:
    """64 bits. Folding keeps the high ones: the low ones of a tuple's hash repeat too soon."""
    bits = hash((digest, salt)) & (2**64 - 1)
    return (bits ^ bits >> 29) * 0x9E3779B97F4A7C15 % 2**64


def digest_of(token_ids: Iterable[int], before: int = 0) -> int:
    """What the last slot of these tokens holds; `before` is that of the tokens before them."""
    for token in token_ids:
        before = hash((before, token))
    return before


def expected_tokens(
    prompt: tuple[int, ...], num_tokens: int, *, seed: int | None = None, vocab_size: int = 7
) -> list[int]:
    """What the fake model continues a prompt with, computed without blocks or scheduler."""
    digest = digest_of(prompt)
    drawn: list[int] = []
    for _ in range(num_tokens):
        drawn.append(draw_token(digest, seed, vocab_size))
        digest = digest_of(drawn[-1:], digest)
    return drawn


def expected_hypotheses(
    request: EngineRequest,
    max_model_len: int,
    *,
    vocab_size: int = 7,
    non_finite_token_id: int | None = None,
) -> tuple[Hypothesis, ...] | None:
    """What a beam search finds with the fake model; None where it meets non-finite logits."""
    params = request.params
    assert params.beam is not None
    search = BeamSearch(
        beam_width=params.n,
        length_penalty=params.beam.length_penalty,
        max_tokens=min(params.max_tokens, max_model_len - len(request.prompt_token_ids)),
        end_token_ids=request.eos_token_ids | params.stop_token_ids,
    )
    of_prompt = digest_of(request.prompt_token_ids)
    while search.beams:
        digests = [digest_of(beam.token_ids, of_prompt) for beam in search.beams]
        if non_finite_token_id in {draw_token(digest, None, vocab_size) for digest in digests}:
            return None
        records = [record(digest, 0, search.num_candidates, vocab_size) for digest in digests]
        search.advance([unpack_best(packed) for packed in records])
    return search.best()

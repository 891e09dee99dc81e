"""A scheduler on a random small pool, and random things done to it.

The pools are so small that sharing, copies, eviction and preemption happen all the time. A failure
names its seed; `random_world(seed)` repeats it.
"""

import random
import struct
from collections.abc import Callable

from helpers.requests import make_beam_request, make_request
from helpers.scheduler_driver import Driver, expected_beams, preempt, solo_run

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import EngineRequest, FinishReason, Sequence, SequenceStatus

NUM_OPERATIONS = 100
VOCAB_SIZE = 5
EOS = 4
NON_FINITE = 3
KINDS = ("plain", "scored", "beams", "prompt alone")


class World:
    """The settings, the requests so far, and the operations."""

    def __init__(self, seed: int):
        self.random = rng = random.Random(seed)
        block_size = rng.choice((1, 2, 3, 4, 4, 16))
        num_blocks = rng.randint(4, 16)
        max_num_seqs = rng.randint(1, 6)
        self.config = SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_seqs + rng.choice((0, 1, 5, 40)),
            max_model_len=min(block_size * num_blocks, 48) - rng.randint(0, 2),
            enable_prefix_caching=rng.random() < 0.9,
            step_sizes=rng.choice(((), (4, 8, 16))),
        )
        self.has_priorities = rng.random() < 0.5
        self.non_finite_token_id = NON_FINITE if rng.random() < 0.2 else None
        self.driver = Driver(
            self.config,
            overlap=rng.random() < 0.5,
            vocab_size=VOCAB_SIZE,
            non_finite_token_id=self.non_finite_token_id,
        )
        self.prefixes = [self.draw_tokens(40) for _ in range(3)]
        self.requests: dict[str, EngineRequest] = {}
        self.cut: set[tuple[str, int]] = set()  # ended from outside: a prefix of the solo run
        self.num_operations = 0

    def draw_tokens(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

    def operate(self) -> None:
        """Does one random operation and checks everything that can be checked."""
        weights: dict[Callable[[], object], int] = {
            self.driver.step: 55,
            self.add: 22,
            self.abort: 4,
            self.finish_sequence: 4,
            self.preempt: 6,
            self.commit_early: 3,
            self.driver.scheduler.kv.reset_cache: 2,
            self.toggle_overlap: 4,
        }
        self.random.choices(list(weights), list(weights.values()))[0]()
        self.driver.scheduler.check_integrity()
        self.check_waste()
        self.num_operations += 1

    def add(self) -> None:
        if len(self.driver.scheduler.roster.requests) > 8:
            return
        request = self.random_request(f"r{len(self.requests)}")
        self.requests[request.request_id] = request
        self.driver.add(request)

    def random_request(self, request_id: str) -> EngineRequest:
        rng, kind = self.random, self.random.choices(KINDS, (75, 12, 10, 3))[0]
        limit = self.config.max_model_len - (kind != "prompt alone")
        prefix = rng.choice(self.prefixes)
        prompt = prefix[: rng.randint(0, limit)] + self.draw_tokens(rng.choice((0, 1, 2, 7)))
        prompt = prompt[:limit] or self.draw_tokens(1)
        options = {
            "eos_token_ids": (EOS,) if rng.random() < 0.5 else (),
            "stop_token_ids": rng.choice(((), (), (1,), (0, 2))),
            "use_prefix_cache": rng.random() < 0.85,
            "cache_salt": rng.choice(("", "", "", "x")),
            "priority": rng.randrange(3) if self.has_priorities else 0,
        }
        if kind == "beams":
            return make_beam_request(
                request_id,
                prompt,
                beam_width=rng.randint(1, 4),
                length_penalty=rng.choice((-1.0, 0.0, 1.0, 2.0)),
                max_tokens=rng.choice((1, 2, 4, 8)),
                **options,
            )
        if kind == "prompt alone":
            return make_request(request_id, prompt, max_tokens=0, prompt_logprobs=1, **options)
        return make_request(
            request_id,
            prompt,
            max_tokens=rng.choice((1, 2, 5, 12, 100)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(-2, 3),
            n=rng.choice((1, 1, 1, 2, 3, 4)),
            prompt_logprobs=rng.choice((0, 1)) if kind == "scored" else None,
            **options,
        )

    def live_sequences(self) -> list[Sequence]:
        requests = self.driver.scheduler.roster.requests.values()
        every = [sequence for request in requests for sequence in request.sequences]
        return [s for s in every if s.status is not SequenceStatus.FINISHED]

    def abort(self) -> None:
        live = self.live_sequences()
        if live:
            request_id = self.random.choice(live).request.request_id
            self.cut |= {(request_id, i) for i in range(4) if (request_id, i) not in self.reasons}
            assert self.driver.scheduler.abort(request_id)
        assert not self.driver.scheduler.abort("unknown")

    def finish_sequence(self) -> None:
        live = [s for s in self.live_sequences() if s.num_output_tokens]
        live = [s for s in live if not s.request.is_beam_search]  # a beam has no stop strings
        if live:
            sequence = self.random.choice(live)
            key = sequence.request.request_id, sequence.index
            self.driver.scheduler.finish_sequence(*key)
            self.cut.add(key)
            # The front tells this end itself.
            self.reasons[key] = FinishReason.STOP_STRING

    def preempt(self) -> None:
        running = self.driver.scheduler.roster.running
        if running:
            preempt(self.driver.scheduler, self.random.choice(running))

    def commit_early(self) -> None:
        if self.driver.in_flight:
            self.driver.commit()

    def toggle_overlap(self) -> None:
        self.driver.overlap = not self.driver.overlap

    @property
    def reasons(self) -> dict[tuple[str, int], FinishReason]:
        return self.driver.reasons

    def check_waste(self) -> None:
        for sequence in self.driver.scheduler.roster.running:
            slots = len(sequence.block_table) * self.config.block_size
            used = sequence.num_scheduled_total
            assert slots - used < self.config.block_size, "a block is held before it is needed"

    def finish(self) -> None:
        """Lets everything end; what came out must be what solo runs give."""
        self.driver.run(max_steps=4000)
        assert self.driver.pool.num_used == 0
        assert set(self.driver.num_preemptions) == set(self.requests)
        for request_id, request in self.requests.items():
            self.check_scores(request)
            if request.params.beam is not None:
                self.check_hypotheses(request)
                continue
            for index in range(request.params.n):
                self.check_tokens(request, (request_id, index))

    def check_scores(self, request: EngineRequest) -> None:
        """The runner's record of a prompt token is the token, and the one before it."""
        prompt, told = request.prompt_token_ids, self.driver.prompt_logprobs
        pairs = list(struct.iter_unpack("=fi", told.get(request.request_id, b"")))
        wanted = list(zip(prompt[1:], prompt, strict=False))
        if request.params.prompt_logprobs is None:
            wanted = []
        is_cut = (request.request_id, 0) in self.cut
        assert pairs == (wanted[: len(pairs)] if is_cut else wanted), request

    def check_hypotheses(self, request: EngineRequest) -> None:
        expected = expected_beams(
            request,
            self.config.max_model_len,
            vocab_size=VOCAB_SIZE,
            non_finite_token_id=self.non_finite_token_id,
        )
        got = self.driver.answers(request.request_id)
        is_cut = (request.request_id, 0) in self.cut
        assert got == ([] if is_cut else expected), request

    def check_tokens(self, request: EngineRequest, key: tuple[str, int]) -> None:
        tokens, reason = solo_run(
            request,
            key[1],
            self.config.max_model_len,
            vocab_size=VOCAB_SIZE,
            non_finite_token_id=self.non_finite_token_id,
        )
        got = self.driver.tokens.get(key, [])
        if key in self.cut:
            assert got == tokens[: len(got)], key
        else:
            assert (got, self.reasons.get(key)) == (tokens, reason), key


def random_world(seed: int) -> World:
    """Does NUM_OPERATIONS operations on a new world, lets it end, and checks the outcome."""
    world = World(seed)
    try:
        while world.num_operations < NUM_OPERATIONS:
            world.operate()
        world.finish()
    except AssertionError as error:
        error.add_note(f"random_world(seed={seed}), operation {world.num_operations}")
        raise
    return world

"""A runner without a device that answers known prompts with known tokens."""

import threading
from collections.abc import Mapping, Sequence

from helpers.fake_runner import FakeRunner

from jaxpaged.config import ResolvedConfig
from jaxpaged.step_plan import StepPlan, StepResult


class ScriptedRunner(FakeRunner):
    """Reads a row's tokens back from the pool, finds the prompt, and continues it.

    Args:
      answers: prompt -> its continuation; after its end comes `end_token_id`, for ever.

    Attributes:
      open: while cleared, `collect` waits from `held_step` on, so that what runs stays running.
      is_broken: every step, and the reset after it, raises.
    """

    num_compiles_after_warmup = 0

    def __init__(
        self,
        config: ResolvedConfig,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        end_token_id: int,
    ):
        super().__init__(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
        )
        self.open = threading.Event()
        self.open.set()
        self.held_step = 0
        self.is_broken = self.is_closed = False
        # The longest first: one prompt may begin with another.
        self._answers = sorted(
            answers.items(),
            key=lambda item: -len(item[0]),
        )
        self._end_token_id = end_token_id
        self._num_blocks = config.num_blocks

    def collect(self, handle: StepResult) -> StepResult:
        if self.num_steps >= self.held_step:
            assert self.open.wait(timeout=30)
        if self.is_broken:
            raise RuntimeError("injected")
        return super().collect(handle)

    def reset(self) -> None:
        if self.is_broken:
            raise RuntimeError("injected: the device is lost")

    def close(self) -> None:
        self.is_closed = True

    def _draw(self, plan: StepPlan) -> StepResult:
        drawn = []
        for source, sample_row in zip(plan.sample_sources, plan.sample_rows, strict=True):
            self._read_prefix(plan.rows[source], plan.kv_lens[source])
            token = self._next_token(self._tokens(plan.rows[source], plan.kv_lens[source]))
            self._device_tokens[sample_row] = token
            drawn.append(token)
        return StepResult(drawn, [True] * len(drawn))

    def _tokens(self, row: int, num_tokens: int) -> tuple[int, ...]:
        tokens = []
        for position in range(num_tokens):
            block = self._block(row, position // self._block_size)
            slot = self.pool[block][position % self._block_size]
            assert slot is not None
            tokens.append(slot.token_id)
        return tuple(tokens)

    def _next_token(self, tokens: tuple[int, ...]) -> int:
        for prompt, answer in self._answers:
            done = len(tokens) - len(prompt)
            if done >= 0 and tokens[: len(prompt)] == prompt:
                return answer[done] if done < len(answer) else self._end_token_id
        raise AssertionError(f"no answer is scripted for {tokens}")

"""What the tests' runners around a real one have in common."""

from typing import Any

from jaxpaged.runner.runner import Runner, StepHandle
from jaxpaged.step_plan import StepPlan, StepResult


class WrappedRunner:
    """Passes on all that an engine asks of a runner."""

    def __init__(self, runner: Runner):
        self.runner = runner

    @property
    def num_compiles_after_warmup(self) -> int:
        return self.runner.num_compiles_after_warmup

    @property
    def step_sizes(self) -> tuple[int, ...]:
        return self.runner.step_sizes

    def dispatch(self, plan: StepPlan) -> StepHandle:
        return self.runner.dispatch(plan)

    def draw(self, handle: StepHandle, masks: Any) -> None:
        self.runner.draw(handle, masks)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.runner.collect(handle)

    def reset(self) -> None:
        self.runner.reset()

    def close(self) -> None:
        self.runner.close()

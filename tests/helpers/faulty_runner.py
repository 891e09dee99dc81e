"""A real runner with one fault: it raises in a step, or calls a row's logits not finite."""

from dataclasses import replace
from typing import Any, Literal

from helpers.wrapped_runner import WrappedRunner

from jaxpaged.runner.runner import Runner, StepHandle
from jaxpaged.step_plan import StepPlan, StepResult

FaultPlace = Literal["before dispatch", "after donation", "collect", "not finite"]


class FaultyRunner(WrappedRunner):
    """Does what `runner` does, but for step `fault_step` (counted from 1).

    Args:
      sample_idx: of "not finite": which of the step's draws.
    """

    def __init__(
        self, runner: Runner, place: FaultPlace, *, fault_step: int = 0, sample_idx: int = 0
    ):
        super().__init__(runner)
        self.place = place
        self.fault_step = fault_step
        self.sample_idx = sample_idx
        self.num_resets = 0
        self.plans: list[StepPlan] = []
        self._num_collected = 0

    def dispatch(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        is_faulty = len(self.plans) == self.fault_step
        if is_faulty and self.place == "before dispatch":
            raise RuntimeError("injected: nothing was dispatched")
        handle = super().dispatch(plan)
        if is_faulty and self.place == "after donation":
            # As after a step whose donated pool never came back.
            self.runner.pool.data.delete()
            raise RuntimeError("injected: the pool is gone")
        return handle

    def collect(self, handle: StepHandle) -> StepResult:
        self._num_collected += 1
        result = super().collect(handle)
        if self._num_collected != self.fault_step:
            return result
        if self.place == "collect":
            raise RuntimeError("injected: no tokens came")
        if self.place == "not finite":
            flags: list[Any] = list(result.is_finite)
            flags[self.sample_idx] = False
            return replace(result, is_finite=flags)
        return result

    def reset(self) -> None:
        self.num_resets += 1
        self._num_collected = self.fault_step = 0
        super().reset()

"""How many tokens a step may have, so that little of the size it is compiled for is padding.

A padded token costs the device as much as a real one, and what is cut off a prompt fills the next
step. So a step that would leave more than a quarter of a size empty takes a smaller size, and fills
that.
"""

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Sequence
from jaxpaged.scheduler.admission import num_tokens_wanted
from jaxpaged.scheduler.roster import Roster
from jaxpaged.scheduler.scheduled_step import ScheduledStep

_FILLED = 3 / 4


def choose_size(
    config: SchedulerConfig,
    roster: Roster,
    step: ScheduledStep,
    prefilling: list[Sequence],
    *,
    admits: bool,
) -> int:
    """Tokens that a step may have, its decodes included.

    Args:
      step: has its decodes, and nothing else.
      prefilling: the running sequences with a prompt under way.
      admits: whether waiting sequences may start in it.
    """
    if not config.step_sizes:
        return config.max_num_tokens
    num_decodes = len(step.scheduled)
    num_wanted = sum(len(s.token_ids) - s.num_scheduled_total for s in prefilling)
    if admits:
        room = config.max_num_tokens - num_decodes - num_wanted
        num_wanted += num_tokens_wanted(config, roster, step, room)
    return fill_size(config.step_sizes, num_decodes, num_wanted, config.max_num_tokens)


def fill_size(sizes: tuple[int, ...], num_decodes: int, num_wanted: int, limit: int) -> int:
    """The largest size of which a step fills three quarters.

    The smallest size is taken however little there is: prompts never wait for company. But sizes
    that the decodes alone fill by more are left out: prompts would trickle through what is left.

    Args:
      sizes: to which steps with prompts are padded, ascending.
      num_wanted: tokens that prompts would compute, were there no limit.
      limit: of tokens in any step.
    """
    num_tokens = min(num_decodes + num_wanted, limit)
    roomy = [size for size in sizes if num_decodes <= _FILLED * size] or sizes[-1:]
    filled = [size for size in roomy if num_tokens >= _FILLED * size]
    return min(filled[-1] if filled else roomy[0], limit)

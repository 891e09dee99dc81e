"""Engine requests with defaults for whatever a test does not care about."""

from collections.abc import Iterable, Sequence

from jaxpaged.request import EngineRequest
from jaxpaged.sampling_params import BeamParams, ResolvedParams


def make_params(**options) -> ResolvedParams:
    """Greedy, 4 tokens, unless told otherwise."""
    defaults = {"max_tokens": 4, "temperature": 0.0}
    stop_token_ids = frozenset(options.pop("stop_token_ids", ()))
    return ResolvedParams(**(defaults | options), stop_token_ids=stop_token_ids)


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    *,
    eos_token_ids: Iterable[int] = (),
    params: ResolvedParams | None = None,
    **options,
) -> EngineRequest:
    """A request; `options` go to `make_params` unless `params` is given."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        params=params or make_params(**options),
        eos_token_ids=frozenset(eos_token_ids),
    )


def make_beam_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    *,
    beam_width: int,
    length_penalty: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    **options,
) -> EngineRequest:
    """A beam search, as the front makes one."""
    return make_request(
        request_id,
        prompt_token_ids,
        eos_token_ids=eos_token_ids,
        stop_token_ids=stop_token_ids,
        n=beam_width,
        beam=BeamParams(length_penalty),
        logprobs=beam_width + len({*eos_token_ids, *stop_token_ids}),
        **options,
    )


def prompt(num_tokens: int, start: int = 100) -> list[int]:
    """Tokens start, start + 1, ...: prompts of starts far apart share nothing."""
    return list(range(start, start + num_tokens))

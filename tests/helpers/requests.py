"""Engine requests with defaults for whatever a test does not care about."""

from collections.abc import Iterable, Sequence

from jaxpaged.request import EngineRequest
from jaxpaged.sampling_params import ResolvedParams


def make_params(
    *,
    max_tokens: int = 4,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    n: int = 1,
    stop: tuple[str, ...] = (),
    stop_token_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    include_stop_string: bool = False,
    skip_special_tokens: bool = True,
    use_prefix_cache: bool = True,
    cache_salt: str = "",
    priority: int = 0,
) -> ResolvedParams:
    return ResolvedParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        n=n,
        stop=stop,
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=ignore_eos,
        include_stop_string=include_stop_string,
        skip_special_tokens=skip_special_tokens,
        use_prefix_cache=use_prefix_cache,
        cache_salt=cache_salt,
        priority=priority,
    )


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


def prompt(num_tokens: int, start: int = 100) -> list[int]:
    """Tokens start, start + 1, ...: prompts of starts far apart share nothing."""
    return list(range(start, start + num_tokens))

"""Teacher-forced scores: how likely a model finds a completion that it did not write."""

from typing import TYPE_CHECKING

from jaxpaged.errors import InvalidFieldError
from jaxpaged.logprobs import TokenLogprob
from jaxpaged.outputs import Score
from jaxpaged.sampling_params import Prompt, SamplingParams

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM

Completion = str | list[int]


async def score(llm: "AsyncLLM", prompt: Prompt, completion: Completion) -> Score:
    """Computes a prompt and its completion as one prompt, and reads off the completion's part.

    A text is tokenised apart from the prompt: its tokens follow the prompt's.

    Raises:
      InvalidFieldError: the prompt or the completion is empty.
      JaxpagedError: the request was refused, or a step of the engine failed.
    """
    prompt_token_ids = await llm.tokenize(prompt)
    if isinstance(completion, str):
        completion = await llm.tokenize(completion, add_special_tokens=False)
    if not prompt_token_ids:
        raise InvalidFieldError("prompt", "the prompt is empty: it must have at least 1 token")
    if not len(completion):
        raise InvalidFieldError("completion", "the completion is empty: it must have a token")
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    output = await llm.generate([*prompt_token_ids, *completion], params)
    assert output.prompt_logprobs is not None
    scored = output.prompt_logprobs[len(prompt_token_ids) :]
    logprobs: list[TokenLogprob] = [at.chosen for at in scored if at.chosen is not None]
    return Score(
        prompt_token_ids=output.prompt_token_ids[: len(prompt_token_ids)],
        token_ids=output.prompt_token_ids[len(prompt_token_ids) :],
        logprobs=logprobs,
        cumulative_logprob=sum(entry.logprob for entry in logprobs),
    )

"""Beam search for users: a request whose n sequences are beams, and its answer as hypotheses."""

from jaxpaged.errors import NonFiniteLogitsError, RequestCancelledError
from jaxpaged.outputs import BeamHypothesis, BeamSearchOutput, RequestOutput
from jaxpaged.request import FinishReason


def beam_search_output(output: RequestOutput, length_penalty: float) -> BeamSearchOutput:
    """The hypotheses of an answer, best first; fewer than asked for where the model has no more.

    Raises:
      NonFiniteLogitsError: the model gave NaN.
      RequestCancelledError: the request was aborted.
    """
    if output.completions[0].finish_reason is FinishReason.ERROR:
        raise NonFiniteLogitsError(
            "the model gave non-finite logits, or the options left no token to draw"
        )
    ended = [c for c in output.completions if c.cumulative_logprob is not None]
    if not ended:
        raise RequestCancelledError("the request was aborted before it ended")
    return BeamSearchOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        hypotheses=[
            BeamHypothesis(
                text=completion.text,
                token_ids=completion.token_ids,
                cumulative_logprob=completion.cumulative_logprob or 0.0,
                score=(completion.cumulative_logprob or 0.0)
                / len(completion.token_ids) ** length_penalty,
                finish_reason=completion.finish_reason,
            )
            for completion in ended
        ],
        usage=output.usage,
        block_saving=output.block_saving,
    )

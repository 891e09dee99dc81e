"""Our log-probabilities <-> protobuf messages."""

from collections.abc import Iterable

from jaxpaged.logprobs import PositionLogprobs, TokenLogprob
from jaxpaged.v1 import inference_pb2 as pb


def logprobs_to_proto(logprobs: Iterable[PositionLogprobs] | None) -> list[pb.PositionLogprobs]:
    return [
        pb.PositionLogprobs(
            chosen=None if position.chosen is None else _token_to_proto(position.chosen),
            top=map(_token_to_proto, position.top),
        )
        for position in logprobs or ()
    ]


def logprobs_from_proto(
    messages: Iterable[pb.PositionLogprobs],
) -> list[PositionLogprobs] | None:
    """None where there are none: the wire does not tell an empty list from an absent one."""
    logprobs = [
        PositionLogprobs(
            _token_from_proto(message.chosen) if message.HasField("chosen") else None,
            list(map(_token_from_proto, message.top)),
        )
        for message in messages
    ]
    return logprobs or None


def _token_to_proto(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        token_bytes=entry.token_bytes,
    )


def _token_from_proto(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank, message.token_bytes)

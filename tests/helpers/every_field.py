"""One way to ask with options by name, in process and over gRPC, and one form of the answers.

The requests on the wire are filled in here by the names of the contract, not by `convert.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from google.protobuf.message import Message
from helpers.running_service import Service

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import Constraint, SamplingParams
from jaxpaged.v1 import inference_pb2 as pb

CONSTRAINTS = [field.name for field in fields(Constraint)]


@dataclass(frozen=True)
class Position:
    """One position's log-probabilities; the chosen id is None where nothing precedes it."""

    chosen_id: int | None
    rank: int
    top_ids: list[int]
    logprob: float


@dataclass(frozen=True)
class Told:
    """One sequence's answer; empty lists where nothing was asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str
    matched_stop: str | int | None
    seed: int
    logprobs: list[Position]
    cumulative_logprob: float


@dataclass(frozen=True)
class Answer:
    completions: list[Told]
    prompt_logprobs: list[Position]
    cached_prompt_tokens: int

    @property
    def only(self) -> Told:
        (told,) = self.completions
        return told


class Ask(Protocol):
    """Runs one request; constraints are options by their own names."""

    async def __call__(self, prompt: Sequence[int], **options: Any) -> Answer: ...


# --- in process --------------------------------------------------------------------------------


def ask_in_process(llm: AsyncLLM) -> Ask:
    async def ask(prompt: Sequence[int], **options: Any) -> Answer:
        constraint = {name: options.pop(name) for name in CONSTRAINTS if name in options}
        if constraint:
            options["constraint"] = Constraint(**constraint)
        return _answer_of(await llm.generate(list(prompt), SamplingParams(**options)))

    return ask


def _answer_of(output: RequestOutput) -> Answer:
    completions = [
        Told(
            completion.text,
            completion.token_ids,
            completion.finish_reason.value,
            completion.matched_stop,
            completion.seed,
            _positions(completion.logprobs or []),
            completion.cumulative_logprob or 0.0,
        )
        for completion in output.completions
    ]
    scored = _positions(output.prompt_logprobs or [])
    return Answer(completions, scored, output.usage.cached_prompt_tokens)


def _positions(positions: Iterable[Any]) -> list[Position]:
    """Of our own class or of the message of the same name: their fields have the same names."""
    told = []
    position: Any
    for position in positions:
        is_message = isinstance(position, Message)
        has_chosen = position.HasField("chosen") if is_message else position.chosen is not None
        chosen: Any = position.chosen if has_chosen else None
        top_ids = [entry.token_id for entry in position.top]
        if chosen is None:
            told.append(Position(None, 0, top_ids, math.nan))
        else:
            told.append(Position(chosen.token_id, chosen.rank, top_ids, chosen.logprob))
    return told


# --- over gRPC ---------------------------------------------------------------------------------


def ask_over_grpc(service: Service) -> Ask:
    async def ask(prompt: Sequence[int], **options: Any) -> Answer:
        return _answer_of_response(await service.stub.Generate(request_of(prompt, options)))

    return ask


def request_of(prompt: Sequence[int], options: Mapping[str, Any]) -> pb.GenerateRequest:
    """A request of token ids with options set in whichever part of it has a field of that name."""
    request = pb.GenerateRequest(token_ids={"ids": prompt})
    for name, value in options.items():
        parts = (request.sampling, request.stop, request.output, request.cache, request)
        (part, *_) = [part for part in parts if name in part.DESCRIPTOR.fields_by_name]
        target = getattr(part, name)
        if isinstance(value, Mapping):
            target.update(value)
        elif isinstance(value, list):
            if isinstance(target, Message):  # a list in a oneof is a message of its own
                target = getattr(target, target.DESCRIPTOR.fields[0].name)
            target.extend(value)
        else:
            setattr(part, name, value)
    return request


def _answer_of_response(response: pb.GenerateResponse) -> Answer:
    completions = []
    for message in response.completions:
        stop = message.WhichOneof("matched_stop")
        reason = pb.FinishReason.Name(message.finish_reason)
        completions.append(
            Told(
                message.text,
                list(message.token_ids),
                reason.removeprefix("FINISH_REASON_").lower(),
                getattr(message, stop) if stop else None,
                message.seed,
                _positions(message.logprobs),
                message.cumulative_logprob,
            )
        )
    scored = _positions(response.prompt_logprobs)
    return Answer(completions, scored, response.usage.cached_prompt_tokens)

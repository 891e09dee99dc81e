"""Our outputs <-> protobuf messages, in both directions. The requests are in convert.py."""

from jaxpaged.convert import duration_from_proto, duration_to_proto
from jaxpaged.convert_logprobs import logprobs_from_proto, logprobs_to_proto
from jaxpaged.errors import NonFiniteLogitsError, RequestCancelledError
from jaxpaged.outputs import (
    Accepted,
    BlockState,
    Completion,
    Delta,
    EngineStats,
    Finished,
    Heartbeat,
    ModelInfo,
    PromptLogprobs,
    RequestOutput,
    Started,
    StreamEvent,
    Timing,
    Usage,
)
from jaxpaged.request import FinishReason
from jaxpaged.v1 import admin_pb2
from jaxpaged.v1 import inference_pb2 as pb

_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.MAX_TOKENS: pb.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: pb.FINISH_REASON_CONTEXT_LENGTH,
}
_REASONS_FROM_PROTO: dict[int, FinishReason] = {
    number: reason for reason, number in _REASONS.items()
}


def wants(options: pb.OutputOptions, name: str) -> bool:
    """Whether `name` (text, token_ids or prompt_token_ids) is to be sent; the first two are on."""
    return getattr(options, name) if options.HasField(name) else name != "prompt_token_ids"


# --- answers -----------------------------------------------------------------------------------


def output_to_proto(
    output: RequestOutput, info: ModelInfo, options: pb.OutputOptions
) -> pb.GenerateResponse:
    """Raises the error that stands for a completion which did not end by itself."""
    response = pb.GenerateResponse(
        request_id=output.request_id,
        model=info.model,
        weights_version=info.weights_version,
        usage=_usage_to_proto(output.usage),
        timing=_timing_to_proto(output.timing),
    )
    if wants(options, "prompt_token_ids"):
        response.prompt_token_ids.extend(output.prompt_token_ids)
    response.prompt_logprobs.extend(logprobs_to_proto(output.prompt_logprobs))
    for completion in output.completions:
        message = response.completions.add(index=completion.index, seed=completion.seed)
        message.cumulative_logprob = completion.cumulative_logprob or 0.0
        _fill_ending(message, completion, options)
    return response


def output_from_proto(response: pb.GenerateResponse) -> RequestOutput:
    return RequestOutput(
        request_id=response.request_id,
        prompt_token_ids=list(response.prompt_token_ids),
        completions=[
            Completion(
                index=message.index,
                text=message.text,
                token_ids=list(message.token_ids),
                finish_reason=_reason_from_proto(message.finish_reason) or FinishReason.ERROR,
                matched_stop=_matched_stop(message),
                seed=message.seed,
                logprobs=logprobs_from_proto(message.logprobs),
                cumulative_logprob=message.cumulative_logprob if message.logprobs else None,
            )
            for message in response.completions
        ],
        usage=_usage_from_proto(response.usage),
        timing=_timing_from_proto(response.timing),
        prompt_logprobs=logprobs_from_proto(response.prompt_logprobs),
    )


def event_to_proto(
    event: StreamEvent, info: ModelInfo, options: pb.OutputOptions
) -> pb.StreamResponse | None:
    """None for a delta of which nothing is wanted. `message_index` is left to the caller."""
    response = pb.StreamResponse()
    match event:
        case Accepted():
            accepted = response.accepted
            accepted.request_id, accepted.seed = event.request_id, event.seed
            accepted.model, accepted.prompt_tokens = info.model, len(event.prompt_token_ids)
            if wants(options, "prompt_token_ids"):
                accepted.prompt_token_ids.extend(event.prompt_token_ids)
        case Started():
            response.started.cached_prompt_tokens = event.cached_prompt_tokens
            response.started.weights_version = info.weights_version
        case PromptLogprobs():
            response.prompt_logprobs.first_position = event.first_position
            response.prompt_logprobs.logprobs.extend(logprobs_to_proto(event.logprobs))
        case Delta():
            response.delta.index = event.index
            _fill_ending(response.delta, event, options)
            delta = response.delta
            if not (delta.text or delta.token_ids or delta.logprobs or delta.finish_reason):
                return None
        case Finished():
            response.finished.usage.CopyFrom(_usage_to_proto(event.usage))
            response.finished.timing.CopyFrom(_timing_to_proto(event.timing))
        case Heartbeat():
            response.heartbeat.SetInParent()
            response.heartbeat.queue_position = event.queue_position
    return response


def event_from_proto(response: pb.StreamResponse) -> StreamEvent | None:
    """None for events that this client does not know."""
    match response.WhichOneof("event"):
        case "accepted":
            accepted = response.accepted
            return Accepted(accepted.request_id, list(accepted.prompt_token_ids), accepted.seed)
        case "started":
            return Started(response.started.cached_prompt_tokens)
        case "delta":
            delta = response.delta
            return Delta(
                index=delta.index,
                text=delta.text,
                token_ids=list(delta.token_ids),
                finish_reason=_reason_from_proto(delta.finish_reason),
                matched_stop=_matched_stop(delta),
                logprobs=logprobs_from_proto(delta.logprobs),
            )
        case "prompt_logprobs":
            scored = response.prompt_logprobs
            logprobs = logprobs_from_proto(scored.logprobs) or []
            return PromptLogprobs(scored.first_position, logprobs)
        case "finished":
            finished = response.finished
            return Finished(_usage_from_proto(finished.usage), _timing_from_proto(finished.timing))
        case "heartbeat":
            return Heartbeat(response.heartbeat.queue_position)
        case _:
            return None


def _fill_ending(
    message: pb.Completion | pb.StreamDelta, source: Completion | Delta, options: pb.OutputOptions
) -> None:
    """What a completion and a delta have in common: text, ids and how it ended."""
    if wants(options, "text"):
        message.text = source.text
    if wants(options, "token_ids"):
        message.token_ids.extend(source.token_ids)
    message.logprobs.extend(logprobs_to_proto(source.logprobs))
    if source.finish_reason is FinishReason.CANCELLED:
        raise RequestCancelledError("the request was aborted before it ended")
    if source.finish_reason is FinishReason.ERROR:
        raise NonFiniteLogitsError(
            "the model gave non-finite logits, or the options left no token to draw"
        )
    if source.finish_reason is not None:
        message.finish_reason = _REASONS[source.finish_reason]
    if isinstance(source.matched_stop, str):
        message.stop_string = source.matched_stop
    elif source.matched_stop is not None:
        message.stop_token_id = source.matched_stop


def _reason_from_proto(number: int) -> FinishReason | None:
    """ERROR stands for a reason newer than this client: on the wire errors are statuses."""
    if number == pb.FINISH_REASON_UNSPECIFIED:
        return None
    return _REASONS_FROM_PROTO.get(number, FinishReason.ERROR)


def _matched_stop(message: pb.Completion | pb.StreamDelta) -> str | int | None:
    kind = message.WhichOneof("matched_stop")
    return getattr(message, kind) if kind else None


def _usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        preemptions=usage.preemptions,
    )


def _usage_from_proto(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        preemptions=usage.preemptions,
    )


def _timing_to_proto(timing: Timing) -> pb.Timing:
    return pb.Timing(
        queued=duration_to_proto(timing.queued_s),
        time_to_first_token=duration_to_proto(timing.time_to_first_token_s),
        total=duration_to_proto(timing.total_s),
    )


def _timing_from_proto(timing: pb.Timing) -> Timing:
    return Timing(
        queued_s=duration_from_proto(timing.queued),
        time_to_first_token_s=duration_from_proto(timing.time_to_first_token),
        total_s=duration_from_proto(timing.total),
    )


# --- model and engine --------------------------------------------------------------------------

_SHARED_INFO_FIELDS = (
    "model",
    "weights_version",
    "vocab_size",
    "has_chat_template",
    "dtype",
    "kv_dtype",
    "block_size",
    "num_blocks",
    "max_model_len",
    "max_num_seqs",
    "max_queued_requests",
)
_DEFAULT_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_STATS_FIELDS = tuple(field.name for field in admin_pb2.EngineStats.DESCRIPTOR.fields)


def info_to_proto(info: ModelInfo) -> pb.GetModelInfoResponse:
    """The part of GetModelInfo that the model and its engine decide, and the wire's defaults."""
    response = pb.GetModelInfoResponse(eos_token_ids=info.eos_token_ids)
    for name in _SHARED_INFO_FIELDS:
        setattr(response, name, getattr(info, name))
    if info.bos_token_id is not None:
        response.bos_token_id = info.bos_token_id
    sampling = response.default_sampling
    # For a text; a conversation may fill the rest of the context.
    sampling.max_tokens, sampling.min_tokens, sampling.n = 16, 0, 1
    for name in _DEFAULT_SAMPLING_FIELDS:
        setattr(sampling, name, getattr(info, f"default_{name}"))
    sampling.presence_penalty = sampling.frequency_penalty = 0.0
    response.default_stop.ignore_eos = response.default_stop.include_stop_string = False
    output = response.default_output
    output.text, output.token_ids, output.prompt_token_ids = True, True, False
    output.skip_special_tokens = True
    response.default_cache.use_prefix_cache = True
    return response


def info_from_proto(response: pb.GetModelInfoResponse) -> ModelInfo:
    defaults = response.default_sampling
    return ModelInfo(
        **{name: getattr(response, name) for name in _SHARED_INFO_FIELDS},
        eos_token_ids=list(response.eos_token_ids),
        bos_token_id=response.bos_token_id if response.HasField("bos_token_id") else None,
        **{f"default_{name}": getattr(defaults, name) for name in _DEFAULT_SAMPLING_FIELDS},
    )


def stats_to_proto(stats: EngineStats) -> admin_pb2.EngineStats:
    return admin_pb2.EngineStats(**{name: getattr(stats, name) for name in _STATS_FIELDS})


def stats_from_proto(message: admin_pb2.EngineStats, block_size: int) -> EngineStats:
    """`block_size` comes from GetModelInfo: the stats on the wire do not carry it."""
    values = {name: getattr(message, name) for name in _STATS_FIELDS}
    return EngineStats(**values, block_size=block_size)


def blocks_to_proto(blocks: list[BlockState]) -> list[admin_pb2.BlockState]:
    return [
        admin_pb2.BlockState(
            references=block.references, used_slots=block.used_slots, cached=block.cached
        )
        for block in blocks
    ]


def blocks_from_proto(blocks: list[admin_pb2.BlockState]) -> list[BlockState]:
    return [BlockState(block.references, block.used_slots, block.cached) for block in blocks]

import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_request_ids",)
    ABORTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    aborted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished_requests", "aborted_requests")
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    finished_requests: int
    aborted_requests: int
    def __init__(self, finished_requests: _Optional[int] = ..., aborted_requests: _Optional[int] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("running_requests", "queued_requests", "total_blocks", "used_blocks", "cached_free_blocks", "used_slots", "steps", "preemptions", "compiles_after_warmup", "prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPILES_AFTER_WARMUP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    queued_requests: int
    total_blocks: int
    used_blocks: int
    cached_free_blocks: int
    used_slots: int
    steps: int
    preemptions: int
    compiles_after_warmup: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    def __init__(self, running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., total_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_free_blocks: _Optional[int] = ..., used_slots: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., compiles_after_warmup: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class BlockState(_message.Message):
    __slots__ = ("references", "used_slots", "cached")
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    references: int
    used_slots: int
    cached: bool
    def __init__(self, references: _Optional[int] = ..., used_slots: _Optional[int] = ..., cached: bool = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("include_blocks",)
    INCLUDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    include_blocks: bool
    def __init__(self, include_blocks: bool = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("stats", "blocks")
    STATS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    stats: EngineStats
    blocks: _containers.RepeatedCompositeFieldContainer[BlockState]
    def __init__(self, stats: _Optional[_Union[EngineStats, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ...) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval", "include_blocks")
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    include_blocks: bool
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., include_blocks: bool = ...) -> None: ...

class WatchStatsResponse(_message.Message):
    __slots__ = ("stats", "blocks")
    STATS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    stats: EngineStats
    blocks: _containers.RepeatedCompositeFieldContainer[BlockState]
    def __init__(self, stats: _Optional[_Union[EngineStats, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("forgotten_blocks",)
    FORGOTTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    forgotten_blocks: int
    def __init__(self, forgotten_blocks: _Optional[int] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("checkpoint_path", "weights_version")
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    checkpoint_path: str
    weights_version: str
    def __init__(self, checkpoint_path: _Optional[str] = ..., weights_version: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("weights_version",)
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    weights_version: str
    def __init__(self, weights_version: _Optional[str] = ...) -> None: ...

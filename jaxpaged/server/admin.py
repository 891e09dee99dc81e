"""AdminService: operations on a running server, on a port of their own."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import PurePath

from jaxpaged.convert import duration_from_proto
from jaxpaged.convert_outputs import blocks_to_proto, stats_to_proto
from jaxpaged.errors import CheckpointError, InvalidFieldError, ModelNotFoundError
from jaxpaged.server.rpc import Call
from jaxpaged.server.serving_state import ServingState
from jaxpaged.v1 import admin_pb2

_DEFAULT_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 0.01
_MAX_ABORT_IDS = 65536
_MAX_PATH_CHARACTERS, _MAX_VERSION_CHARACTERS = 4096, 256


class AdminService:
    """Methods named and ordered as in admin.proto; `rpc.py` makes handlers of them."""

    def __init__(self, state: ServingState, default_drain_s: float) -> None:
        self._state = state
        self._default_drain_s = default_drain_s

    async def Abort(self, request: admin_pb2.AbortRequest, call: Call) -> admin_pb2.AbortResponse:
        if len(request.request_ids) > _MAX_ABORT_IDS:
            raise InvalidFieldError(
                "request_ids",
                f"{len(request.request_ids)} request_ids: at most {_MAX_ABORT_IDS} at once",
            )
        aborted = await self._state.get().abort(list(request.request_ids))
        return admin_pb2.AbortResponse(aborted_request_ids=aborted)

    async def Drain(self, request: admin_pb2.DrainRequest, call: Call) -> admin_pb2.DrainResponse:
        timeout_s = self._default_drain_s
        if request.HasField("timeout"):
            timeout_s = duration_from_proto(request.timeout)
        if timeout_s < 0:
            raise InvalidFieldError("timeout", f"timeout={timeout_s:g} s must be at least 0 s")
        finished, aborted = await self._state.drain(timeout_s)
        return admin_pb2.DrainResponse(finished_requests=finished, aborted_requests=aborted)

    async def GetStats(
        self, request: admin_pb2.GetStatsRequest, call: Call
    ) -> admin_pb2.GetStatsResponse:
        llm = self._state.get()
        response = admin_pb2.GetStatsResponse(stats=stats_to_proto(await llm.stats()))
        if request.include_blocks:
            response.blocks.extend(blocks_to_proto(await llm.block_states()))
        return response

    async def WatchStats(
        self, request: admin_pb2.WatchStatsRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.WatchStatsResponse]:
        llm = self._state.get()
        interval_s = _DEFAULT_INTERVAL_S
        if request.HasField("interval"):
            interval_s = duration_from_proto(request.interval)
        if interval_s < _MIN_INTERVAL_S:
            raise InvalidFieldError(
                "interval", f"interval={interval_s} s must be at least {_MIN_INTERVAL_S} s"
            )
        while True:
            response = admin_pb2.WatchStatsResponse(stats=stats_to_proto(await llm.stats()))
            if request.include_blocks:
                response.blocks.extend(blocks_to_proto(await llm.block_states()))
            yield response
            await asyncio.sleep(interval_s)

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, call: Call
    ) -> admin_pb2.ResetPrefixCacheResponse:
        forgotten = await self._state.get().reset_prefix_cache()
        return admin_pb2.ResetPrefixCacheResponse(forgotten_blocks=forgotten)

    async def UpdateWeights(
        self, request: admin_pb2.UpdateWeightsRequest, call: Call
    ) -> admin_pb2.UpdateWeightsResponse:
        path = request.checkpoint_path
        if not path:
            raise InvalidFieldError("checkpoint_path", "checkpoint_path must not be empty")
        _check_length("checkpoint_path", path, _MAX_PATH_CHARACTERS)
        _check_length("weights_version", request.weights_version, _MAX_VERSION_CHARACTERS)
        version = request.weights_version or PurePath(path).name
        try:
            await self._state.get().update_weights(path, version)
        except CheckpointError as error:
            raise InvalidFieldError("checkpoint_path", f"checkpoint_path: {error}") from error
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"checkpoint_path: {error}") from error
        return admin_pb2.UpdateWeightsResponse(weights_version=version)


def _check_length(name: str, value: str, limit: int) -> None:
    if len(value) > limit:
        raise InvalidFieldError(name, f"{name} of {len(value)} characters: at most {limit}")

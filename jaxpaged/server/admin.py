"""AdminService: operations on a running server, on a port of their own."""

import asyncio
from collections.abc import AsyncGenerator

from jaxpaged.convert import duration_from_proto
from jaxpaged.convert_outputs import blocks_to_proto, stats_to_proto
from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.server.rpc import Call
from jaxpaged.server.service import LoadedModel
from jaxpaged.v1 import admin_pb2

_DEFAULT_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 0.01


class AdminService:
    """Methods named and ordered as in admin.proto; `rpc.py` makes handlers of them."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    async def Abort(self, request: admin_pb2.AbortRequest, call: Call) -> admin_pb2.AbortResponse:
        aborted = await self._model.get().abort(list(request.request_ids))
        return admin_pb2.AbortResponse(aborted_request_ids=aborted)

    async def Drain(self, request: admin_pb2.DrainRequest, call: Call) -> admin_pb2.DrainResponse:
        raise UnsupportedOptionError("Drain", "Drain is not supported by this build")

    async def GetStats(
        self, request: admin_pb2.GetStatsRequest, call: Call
    ) -> admin_pb2.GetStatsResponse:
        llm = self._model.get()
        response = admin_pb2.GetStatsResponse(stats=stats_to_proto(await llm.stats()))
        if request.include_blocks:
            response.blocks.extend(blocks_to_proto(await llm.block_states()))
        return response

    async def WatchStats(
        self, request: admin_pb2.WatchStatsRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.WatchStatsResponse]:
        llm = self._model.get()
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
        forgotten = await self._model.get().reset_prefix_cache()
        return admin_pb2.ResetPrefixCacheResponse(forgotten_blocks=forgotten)

    async def UpdateWeights(
        self, request: admin_pb2.UpdateWeightsRequest, call: Call
    ) -> admin_pb2.UpdateWeightsResponse:
        raise UnsupportedOptionError(
            "UpdateWeights", "UpdateWeights is not supported by this build"
        )

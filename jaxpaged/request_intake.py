"""Requests on their way in, past the checks, and what their engine tells on its way back."""

import asyncio
from collections.abc import Callable

from jaxpaged import validation
from jaxpaged.collector import Collector
from jaxpaged.engine_client import EngineClient, OnDied, OnOutputs
from jaxpaged.errors import DuplicateRequestIdError, JaxpagedError, QueueFullError
from jaxpaged.live_requests import LiveRequests, call_soon
from jaxpaged.observer import RequestObserver
from jaxpaged.outputs import StepOutputs
from jaxpaged.request_maker import FrontModel, RequestMaker
from jaxpaged.sampling_params import Prompt, SamplingParams


class RequestIntake:
    """The way from a front's event loop to its engine, and from the engine's threads to that loop.

    One loop at a time: another one may take over when no request of the first is left.

    Args:
      connect: makes a client of the engine, which tells what happens there.

    Attributes:
      config: of the front; how many requests may wait.
      engine: where requests run.
      live: the requests under way.
      maker: makes what the engine takes.
    """

    def __init__(
        self, model: FrontModel, connect: Callable[[OnOutputs, OnDied], EngineClient]
    ) -> None:
        self.config = model.config
        self._tokenizer = model.tokenizer
        self._num_requests = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = connect(self._on_outputs, self.fail_all)
        self.live = LiveRequests(self.engine)
        self.maker = RequestMaker(model, self.engine.config)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        observer: RequestObserver | None,
        request_id: str | None = None,
        queue_timeout_s: float | None = None,
        *,
        return_text: bool = True,
        length_penalty: float | None = None,
    ) -> Collector:
        """Checks everything, then hands the request to the engine.

        Args:
          observer: told what happens to the request; None: nobody.
          request_id: the user's; None: a new one.
          queue_timeout_s: give up when it has not started so long after this call.
          return_text: False: only what stop strings and the like need.
          length_penalty: of a beam search; None for other requests.

        Raises:
          JaxpagedError: the request was refused.
          RuntimeError: requests of another event loop are still running.
        """
        self._enter_loop()
        self.check_queue()  # before any work: an overloaded server must refuse cheaply
        request_id = validation.check_request_id(request_id)
        self._num_requests += 1
        engine_id = f"{self._num_requests}"
        async with self.live.arriving(queue_timeout_s) as arrival:
            request = await self.maker.make(engine_id, prompt, params, length_penalty)
            processor = request.params.logits_processor
            if processor is not None:
                await asyncio.to_thread(self.engine.prepare, processor)
        # why only now: nothing below waits, so that no two calls can pass the checks together
        if request_id in self.live:
            raise DuplicateRequestIdError(f"request_id={request_id!r} is running already")
        self.check_queue()
        needs_text = return_text or request.params.needs_token_texts
        tokenizer = self._tokenizer if needs_text else None
        collector = Collector(request_id, request, tokenizer, observer)
        self.engine.submit(request)
        self.live.add(collector, arrival)
        return collector

    def check_queue(self) -> None:
        """Raises QueueFullError when as many requests wait as may."""
        limit = self.config.max_queued_requests
        if self.live.num_queued >= limit:
            raise QueueFullError(
                f"{self.live.num_queued} requests wait already: max_queued_requests={limit}"
            )

    def fail_all(self, error: JaxpagedError) -> None:
        """Nothing more comes for what runs. May be called in any thread."""
        if self._loop is not None:
            call_soon(self._loop, self.live.fail_all, error)

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if len(self.live) and self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("requests of another event loop are still running")
            self.live.forget_all()
            self._loop = loop

    def _on_outputs(self, outputs: StepOutputs) -> None:
        """Called in a thread of the client's."""
        assert self._loop is not None
        call_soon(self._loop, self.live.deliver, outputs)

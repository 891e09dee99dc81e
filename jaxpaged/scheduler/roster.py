"""Who is in the house: every request and sequence, and what each holds (a row, blocks, a place)."""

from bisect import insort
from dataclasses import replace

from jaxpaged.config import SchedulerConfig
from jaxpaged.outputs import RequestEnded, SequenceOutput, StepOutputs
from jaxpaged.request import EngineRequest, FinishReason, Request, Sequence, SequenceStatus
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.scheduled_step import row_of
from jaxpaged.scheduler.waiting_queue import WaitingQueue


class Roster:
    """A running sequence holds a row and blocks, a waiting one neither, a finished one is gone."""

    def __init__(self, config: SchedulerConfig):
        self.requests: dict[str, Request] = {}
        self.running: list[Sequence] = []  # in scheduling order
        self.waiting = WaitingQueue()
        self.outputs = StepOutputs()
        self.num_preemptions = 0
        self.num_masked = 0  # running sequences that a grammar binds
        self._config = config
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self.kv = self._new_kv()

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def add(self, source: EngineRequest) -> Request:
        """Queues a request. Its id must be new among those that have not ended."""
        assert source.request_id not in self.requests, f"{source.request_id=} runs already"
        # One that never fits would wait at the head of the queue for ever, all others behind it.
        num_prompt, limit = len(source.prompt_token_ids), self._config.max_model_len
        fits = num_prompt + min(source.params.max_tokens, 1) <= limit
        assert num_prompt > 0 and fits, f"{num_prompt=} must be at least 1 and fit {limit=}"
        request = Request(source, self._num_arrived)
        self._num_arrived += 1
        self.requests[source.request_id] = request
        self.waiting.push(request.new_sequence(self._config.max_model_len))
        return request

    def start(self, sequence: Sequence) -> None:
        """Gives a sequence that has its first blocks a row."""
        sequence.status = SequenceStatus.RUNNING
        sequence.row = self._free_rows.pop()
        self.num_masked += bool(sequence.request.source.params.grammar)
        insort(self.running, sequence, key=lambda other: other.order)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks and row; it will compute prompt and output again."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence; `forget_finished` must follow once all that end have ended."""
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        request = sequence.request
        request.num_unfinished -= 1
        if not request.num_unfinished:
            del self.requests[request.request_id]
            ended = RequestEnded(request.request_id, request.num_preemptions)
            self.outputs.ended.append(replace(ended, block_saving=request.block_saving))

    def finish_all(self, request: Request, reason: FinishReason) -> None:
        """Ends all sequences of a request, in any state, and tells it."""
        for sequence in list(request.sequences):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if request.is_beam_search:  # no beam is one of the n answers yet
                self.finish(sequence, reason)
            else:
                self.tell_and_finish(sequence, reason)
        self.forget_finished()

    def drop(self, sequence: Sequence) -> None:
        """Lets go of a beam that does not live on; another of its request does."""
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.request.sequences.remove(sequence)
        sequence.request.num_unfinished -= 1
        self.forget_finished()

    def tell_and_finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence with no further token; `forget_finished` must follow."""
        output = SequenceOutput(sequence.request.request_id, sequence.index, (), reason)
        self.outputs.sequences.append(output)
        self.finish(sequence, reason)

    def forget_finished(self) -> None:
        self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]

    def take_outputs(self) -> StepOutputs:
        outputs, self.outputs = self.outputs, StepOutputs()
        return outputs

    def replace_kv(self) -> None:
        """Starts from an empty pool and cache; no sequence may hold blocks."""
        self.kv = self._new_kv()

    def check_integrity(self) -> None:
        """Raises AssertionError unless rows and blocks are where they belong."""
        sequences = [s for request in self.requests.values() for s in request.sequences]
        running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
        assert sorted(running, key=lambda s: s.order) == self.running
        rows = [row_of(s) for s in running] + self._free_rows
        assert sorted(rows) == list(range(self._config.max_num_seqs)), f"rows lost: {rows}"
        assert all(s.row is None for s in sequences if s not in running)
        masked = [s for s in running if s.request.source.params.grammar]
        assert len(masked) == self.num_masked
        self.kv.check_integrity(sequences)

    def _release(self, sequence: Sequence) -> None:
        """Takes back the sequence's blocks and row.

        A step in flight may still write there: it runs on the device before any later step.
        """
        self.kv.free(sequence)
        self.num_masked -= bool(sequence.request.source.params.grammar)
        self._free_rows.append(row_of(sequence))
        sequence.row = None
        sequence.has_device_token = False
        sequence.num_computed_tokens = sequence.num_inflight_tokens = 0

    def _new_kv(self) -> KVManager:
        return KVManager(
            num_blocks=self._config.num_blocks,
            block_size=self._config.block_size,
            enable_prefix_caching=self._config.enable_prefix_caching,
        )

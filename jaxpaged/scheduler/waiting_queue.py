"""Sequences that wait for a row and blocks, in the order in which they are served."""

from heapq import heappop, heappush

from jaxpaged.request import Sequence, SequenceStatus

type _Key = tuple[int, bool, int, int]


class WaitingQueue:
    """Lower priority first; within one, those that ran before, then by arrival.

    Sequences that finish while they wait (aborted) are dropped when they come up.
    """

    def __init__(self):
        self._heap: list[tuple[_Key, Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        priority, arrival_idx, index = sequence.order
        key = (priority, not sequence.request.started, arrival_idx, index)
        heappush(self._heap, (key, sequence))

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1].status is not SequenceStatus.WAITING:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        return heappop(self._heap)[1]

    def __bool__(self) -> bool:
        return self.peek() is not None

"""What a front tells about its requests while they run, to whoever counts: metrics."""

from typing import Protocol

from jaxpaged.outputs import Timing
from jaxpaged.request import FinishReason


class RequestObserver(Protocol):
    """Called in the front's event loop, so a call must be quick."""

    def on_started(self, queued_s: float) -> None:
        """The engine scheduled a request for the first time."""
        ...

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """A sequence got tokens, `gap_s` after the ones before; None for its first ones."""
        ...

    def on_first_token(self, time_to_first_token_s: float) -> None: ...

    def on_sequence_ended(self, reason: FinishReason) -> None: ...

    def on_ended(self, timing: Timing) -> None:
        """All sequences of a request have ended without an error."""
        ...

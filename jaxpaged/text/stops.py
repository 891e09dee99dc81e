"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Text that is safe to release now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopChecker:
    """Holds back what could become a stop string, and nothing more.

    The stop string completed first ends the text, whatever pieces it arrived in; of several
    completed by the same character, the longest. So of "DEF" and "DEFGHI" the second never matches.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_string: bool):
        """`stops` are not empty strings; none at all is fine."""
        self._stops = tuple(stops)
        self._include_stop_string = include_stop_string
        # Longest first: the first that ends a text is what must be held back.
        prefixes = {stop[:i] for stop in self._stops for i in range(1, len(stop))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Takes the next piece. After a match what follows in it is dropped, and no more may come.

        The rest of an incomplete character (`Detokenizer.finish`) is a piece like any other.
        """
        if not self._stops:
            return StopMatch(text)
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(text[: end if self._include_stop_string else start], stop)
        held_length = 0
        if text.endswith(self._prefixes):
            held_length = next(len(prefix) for prefix in self._prefixes if text.endswith(prefix))
        safe_length = len(text) - held_length
        self._held = text[safe_length:]
        return StopMatch(text[:safe_length])

    def finish(self) -> str:
        """What was held back; nothing after a match."""
        held, self._held = self._held, ""
        return held

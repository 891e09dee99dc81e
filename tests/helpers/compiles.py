"""Counts compiles as JAX itself does."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compiles() -> Iterator[list[str]]:
    """Every compile of this process, counted by JAX itself; one found on disk counts too."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)

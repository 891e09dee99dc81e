"""Compiled programs by key: made when first asked for, counted, and kept between starts."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxpaged.runner.executable_store import ExecutableStore, describe

logger = logging.getLogger(__name__)


class Programs:
    """Thread-safe in what differs: warm-up makes programs in threads, one key in one of them.

    Args:
      settings: what shapes the programs beside their keys and arguments.
      default_out: sharding of outputs.

    Attributes:
      num_compiles: programs made, be they compiled or loaded from a store.
      num_loads: those of them that were loaded.
    """

    def __init__(self, settings: tuple[object, ...], default_out: NamedSharding):
        self.num_compiles = 0
        self.num_loads = 0
        self._settings = settings
        self._default_out = default_out
        self._lock = threading.Lock()  # of the counts
        self._lowering = threading.Lock()
        self._store: ExecutableStore | None = None
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._compiled

    def __getitem__(self, key: tuple[object, ...]) -> Any:
        return self._compiled[key]

    @contextmanager
    def kept_in(self, store: ExecutableStore | None) -> Iterator[None]:
        """Takes programs from `store` meanwhile, and puts there what it lacks."""
        if store is None:
            yield
            return
        with store.opened():
            self._store = store
            try:
                yield
            finally:
                self._store = None

    def get(
        self,
        key: tuple[object, ...],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        donate: tuple[int, ...] = (),
        keep_unused: bool = False,
        out: Any = None,
        options: dict[str, Any] | None = None,
        check: Callable[[str], None] | None = None,
    ) -> Any:
        """Makes it at the first call; outputs are sharded as `default_out` unless `out` says more.

        Args:
          keep_unused: arguments that are only there to be donated.
          options: XLA's.
          check: looks at the traced program, and raises where it must not run.
        """
        if key in self._compiled:
            return self._compiled[key]
        start = time.monotonic()
        out = self._default_out if out is None else out
        store = self._store if check is None else None  # why: a check needs the trace
        description, program = "", None
        if store is not None:
            settings = (self._settings, donate, out, options)
            description = f"{key} {settings} {describe(arguments)}"
            program = store.load(description, arguments)
        is_loaded = program is not None
        if program is None:
            # why a new function: what JAX compiled before may not be fit for a store
            jitted = jax.jit(
                partial(function),
                donate_argnums=donate,
                keep_unused=keep_unused,
                out_shardings=out,
            )
            # why locked: it is Python, so one thread at a time brings the first one to XLA soonest
            with self._lowering:
                traced = jitted.trace(*arguments)
                if check is not None:
                    check(str(traced.jaxpr))
                lowered = traced.lower()
            program = (
                lowered.compile(options)
                if store is None
                else store.compile(description, lowered, options)
            )
        self._compiled[key] = program
        with self._lock:
            self.num_compiles += 1
            self.num_loads += is_loaded
        verb, seconds = "loaded" if is_loaded else "compiled", time.monotonic() - start
        logger.info("%s %s in %.1f s", verb, " ".join(map(str, key)), seconds)
        return program

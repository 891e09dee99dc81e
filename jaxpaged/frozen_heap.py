"""Keeps what engines started with out of the garbage collector's sight.

Once JAX is loaded a full collection takes 0.1 to 0.3 s, in the midst of some step. What a process
has when an engine is ready mostly stays until the engine closes, so it is collected once and then
left alone. The price: of the process's own objects, cycles that are dropped meanwhile are freed
only when the last engine has closed.
"""

import gc
import threading

_lock = threading.Lock()
_num_engines = 0


def freeze() -> None:
    """An engine is ready."""
    global _num_engines
    with _lock:
        _num_engines += 1
        gc.collect()
        gc.freeze()


def unfreeze() -> None:
    """An engine has closed; with the last one, all is collected as usual again."""
    global _num_engines
    with _lock:
        _num_engines -= 1
        if _num_engines == 0:
            gc.unfreeze()

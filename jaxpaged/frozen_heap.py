"""Keeps what engines and servers started with out of the garbage collector's sight.

Once JAX is loaded a full collection takes 0.1 to 0.3 s, in the midst of some step. What a process
has when one is ready mostly stays until it closes, so it is collected once and then
left alone. The price: of the process's own objects, cycles that are dropped meanwhile are freed
only when the last of them has closed.
"""

import gc
import threading

_lock = threading.Lock()
_num_users = 0


def freeze() -> None:
    """An engine or a server is ready."""
    global _num_users
    with _lock:
        _num_users += 1
        gc.collect()
        gc.freeze()


def unfreeze() -> None:
    """One has closed; with the last, all is collected as usual again."""
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users == 0:
            gc.unfreeze()

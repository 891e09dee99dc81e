"""How long gRPC's asyncio side lives in a process."""

import functools

import grpc.aio


@functools.cache
def keep_grpc_running() -> None:
    """Keeps it until the process ends. By itself it ends with the last channel or server.

    It does so in whatever thread the garbage collector finds that one, and waits there until all
    calls have ended; those of an event loop that was closed never do. Once it was a thread in which
    JAX traced a program, and that kept the lock that others wait for.
    """
    # The stubs do not know it.
    grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue]

"""What a front and an engine in another process say to each other: MessagePack, one list a step.

The dataclasses of `request.py` and `outputs.py` travel as they are; msgspec checks their types.
"""

from typing import Literal

import msgspec

from jaxpaged import errors
from jaxpaged.config import ResolvedConfig
from jaxpaged.outputs import BlockState, EngineStats, StepOutputs
from jaxpaged.request import EngineRequest

# --- front -> engine: a list of these ----------------------------------------------------------


class Submit(msgspec.Struct, array_like=True, tag=True):
    request: EngineRequest


class FinishSequence(msgspec.Struct, array_like=True, tag=True):
    request_id: str
    index: int


class Ask(msgspec.Struct, array_like=True, tag=True):
    """Wants a Reply. `argument` is a request id or a path, where the method takes one."""

    call_id: int
    method: Literal["abort", "stats", "block_states", "reset_prefix_cache", "update_weights"]
    argument: str | None = None


class Close(msgspec.Struct, array_like=True, tag=True):
    pass


Command = Submit | FinishSequence | Ask | Close


# --- engine -> front: one of these -------------------------------------------------------------


class Failure(msgspec.Struct, array_like=True):
    """An error of jaxpaged/errors.py by its class's name; any other one as its base class."""

    name: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        if not isinstance(error, errors.JaxpagedError):
            return cls(errors.JaxpagedError.__name__, f"{type(error).__name__}: {error}")
        return cls(type(error).__name__, str(error), getattr(error, "field", None))

    def error(self) -> errors.JaxpagedError:
        error_class = getattr(errors, self.name)
        if self.field is None:
            return error_class(self.message)
        return error_class(self.field, self.message)


class Connected(msgspec.Struct, array_like=True, tag=True):
    """The first message, before the engine is loaded: the socket's file is not needed any more."""


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The engine takes requests."""

    config: ResolvedConfig


class StartFailed(msgspec.Struct, array_like=True, tag=True):
    failure: Failure


class Reply(msgspec.Struct, array_like=True):
    call_id: int
    value: msgspec.Raw
    failure: Failure | None = None


class Stepped(msgspec.Struct, array_like=True, tag=True):
    """All rows of one step, and the answers to the calls before it."""

    outputs: StepOutputs
    replies: list[Reply]


EngineMessage = Connected | Ready | StartFailed | Stepped

REPLY_TYPES = {
    "abort": bool,
    "stats": EngineStats,
    "block_states": list[BlockState],
    "reset_prefix_cache": int,
    "update_weights": None,
}

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode

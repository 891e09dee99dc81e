"""Bytes of a request -> a message of this build's contract, or why there is none.

A field from a newer contract asks for something that this build would drop: it is refused. Looking
for one in Python, message by message, would keep the event loop for seconds when a client sends
millions of small messages; the library finds by size whether there is one at all.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import islice

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError

_MESSAGE_PACKAGE = "jaxpaged.v1"
# How far a refusal looks for the number of a field that is unknown.
_MAX_NAMED_BYTES = 1024
_MAX_NAMED_MESSAGES = 256


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that must not be answered. Raising while gRPC parses would end it as UNKNOWN."""

    error: InvalidFieldError | UnsupportedOptionError


def parse_request(message_class: type[Message], data: bytes) -> Message | Refused:
    """The message in `data`, or the error with which to refuse it."""
    try:
        message = message_class.FromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.full_name
        text = f"the request's {len(data)} bytes are not a {name}"
        return Refused(InvalidFieldError("request", text))
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    num_unknown = num_bytes - message.ByteSize()
    if not num_unknown:
        return message
    if num_unknown <= _MAX_NAMED_BYTES:
        for inner in islice(_messages_in(message_class.FromString(data)), _MAX_NAMED_MESSAGES):
            for unknown in UnknownFieldSet(inner):
                name = f"{inner.DESCRIPTOR.name}.{unknown.field_number}"
                text = f"field number {name} is not known to this build"
                return Refused(UnsupportedOptionError(name, text))
    name = message_class.DESCRIPTOR.name
    text = f"{name} has {num_unknown} bytes of fields that are not known to this build"
    return Refused(UnsupportedOptionError(name, text))


def _messages_in(message: Message) -> Generator[Message]:
    """`message` and those of our own contract inside it."""
    yield message
    for field, value in message.ListFields():
        inner = field.message_type
        if inner is None or inner.file.package != _MESSAGE_PACKAGE or isinstance(value, Mapping):
            continue
        for item in [value] if isinstance(value, Message) else value:
            yield from _messages_in(item)

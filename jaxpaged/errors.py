"""Errors that jaxpaged raises on purpose. One message names the field, the value and the limit."""


class JaxpagedError(Exception):
    """Base of all errors here. `reason` is the word of the wire contract's error table."""

    reason = "BUG"


class InvalidFieldError(JaxpagedError, ValueError):
    """A field has a value that no build accepts."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class ContextTooLongError(InvalidFieldError):
    """The prompt leaves no room for a token in the model's context or in the pool."""

    reason = "CONTEXT_TOO_LONG"


class UnsupportedOptionError(JaxpagedError, NotImplementedError):
    """A field is valid, but this build does not honour it yet."""

    reason = "UNSUPPORTED_OPTION"

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class ModelNotFoundError(JaxpagedError, ValueError):
    """No model of that name or at that path, or not the one that is loaded."""

    reason = "MODEL_NOT_FOUND"


class CheckpointError(JaxpagedError, ValueError):
    """Files of a model are missing, truncated or do not fit its config."""

    reason = "INVALID_FIELD"


class DuplicateRequestIdError(JaxpagedError, ValueError):
    """A request with this id is still running."""

    reason = "DUPLICATE_REQUEST_ID"


class QueueFullError(JaxpagedError):
    """`max_queued_requests` requests wait already."""

    reason = "QUEUE_FULL"


class NonFiniteLogitsError(JaxpagedError):
    """The model gave NaN, or masked every token, in a row of this request."""

    reason = "NON_FINITE_LOGITS"


class EngineFailedError(JaxpagedError):
    """A step failed; the requests that ran in it are lost, the engine goes on."""

    reason = "BUG"


class EngineClosedError(JaxpagedError):
    """The engine was closed; nothing runs on it any more."""

    reason = "NOT_READY"


class RequestCancelledError(JaxpagedError):
    """The request was aborted before it ended."""

    reason = "ABORTED_BY_OPERATOR"


class QueueTimeoutError(JaxpagedError):
    """The request had not started when its `queue_timeout` was over."""

    reason = "QUEUE_TIMEOUT"


class SlowReaderError(JaxpagedError):
    """The reader of a stream fell behind by more tokens than its buffer holds."""

    reason = "SLOW_READER"


class ServerDrainingError(JaxpagedError):
    """The server is about to stop: it accepts nothing, and what outlives the grace time ends."""

    reason = "SERVER_DRAINING"


class EngineRestartingError(JaxpagedError):
    """The engine's process ended and is started again; what ran on it is lost."""

    reason = "ENGINE_RESTARTING"


class WeightsChangedError(JaxpagedError):
    """The weights were replaced while the request ran."""

    reason = "WEIGHTS_CHANGED"


class BadTokenError(JaxpagedError):
    """The call carries no bearer token, or one that the server does not know."""

    reason = "BAD_TOKEN"


class AdminOnlyError(JaxpagedError):
    """The call's token is a user's; AdminService wants an operator's."""

    reason = "ADMIN_ONLY"

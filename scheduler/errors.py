"""The exception tree.

    PagedRayError                    500  internal_error
    ├── InvalidRequest               400  the client's fault: names the parameter
    │   ├── ContextLengthExceeded    400  prompt and max_tokens do not fit the context
    │   ├── ModelNotFound            404  no such model here
    │   └── ReaderTooSlow            408  an answer was not taken as fast as it was made, and its buffer is full
    ├── InvalidApiKey                401  keys are configured, and this is none of them
    ├── Overloaded                   429  a queue is at its bound; carries Retry-After
    │   ├── RateLimited              429  the tenant has used what its limits allow
    │   └── DeadlineUnmeetable       429  the first token cannot come within the asked time: refused early, not late
    ├── EngineDead                   503  the worker group that held the request is gone; safe to retry
    ├── ConfigError                  500  a setting is wrong; raised at start, names key, value and what would be right
    ├── CheckpointError              500  a model's files are missing, damaged or not supported
    └── KVTransferError              500  KV blocks came damaged, late or not at all; they are computed instead

Every exception here can be pickled: its constructor takes the values it shows, in `args`.
"""


class PagedRayError(Exception):
    """Base of everything PagedRay raises on purpose. `status` is its HTTP status, `type` and `code` its envelope."""

    status = 500
    type = "internal_error"
    code: str | None = "internal_error"

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return self.message


class InvalidRequest(PagedRayError):
    """What the client asked cannot be done. `param` names the field at fault, if one is."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message, param)

    @property
    def param(self) -> str | None:
        return self.args[1]


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class ReaderTooSlow(InvalidRequest):
    status = 408
    code = "reader_too_slow"


class Overloaded(PagedRayError):
    """A bounded queue is full. `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message, retry_after)

    @property
    def retry_after(self) -> float:
        return self.args[1]


class InvalidApiKey(PagedRayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class RateLimited(Overloaded):
    """A tenant's limit is reached."""

    code = "rate_limit_exceeded"


class DeadlineUnmeetable(Overloaded):
    code = "deadline_unmeetable"


class EngineDead(PagedRayError):
    """The worker group that held this request is gone. The same request may be sent again."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_dead"


class ShuttingDown(EngineDead):
    """The application ends. The same request may be sent again, to the next one."""


class GroupLost(EngineDead):
    """A worker group is lost with a request that another one can go on with: callers see it only where none can."""


class GroupDrained(GroupLost):
    """The same where the group leaves on purpose: it was not the request that ended it."""


class ConfigError(PagedRayError):
    code = "config_error"


class CheckpointError(PagedRayError):
    code = "checkpoint_error"


class KVTransferError(PagedRayError):
    """KV blocks that should have come from elsewhere did not, or are not what they should be. No client sees it."""

"""Every error that a client can be given, and the one envelope for all of them.

ApiError
├── InvalidRequest             400  the request is wrong; `param` names the field
│   ├── UnsupportedParameter   400  a parameter this server does not have
│   ├── ContextLengthExceeded  400  prompt longer than the context; both numbers in the message
│   ├── KeyInUrl               400  logs would keep it
│   └── ModelNotFound          404  another model was asked for
├── InvalidApiKey              401
├── HostNotAllowed             403  the ops listener answers only to its own names
├── CrossOrigin                403  and not to pages of others
├── NotFound                   404  no such route
├── MethodNotAllowed           405
├── BodyTimeout                408  the body stopped half-way
├── BodyTooLarge               413
├── Busy                            try again: carries Retry-After
│   ├── QueueFull              429
│   ├── TooManyLogins          429
│   ├── Draining               503
│   ├── EngineLoading          503
│   ├── EngineUnavailable      503
│   ├── EngineStuck            503  the last engine cannot be killed, so there is no next one
│   └── DevicePressure         503  a device has no memory left for more requests
├── RequestTimedOut            504
├── GenerationFailed           500  the engine gave up on this one request; `code` says why
├── ShutDown                   503  the service ended while the request was running
└── InternalError              500  our own fault; the log has the traceback

Before the first byte an error is an HTTP status with this envelope, after it an SSE event with the same envelope.
No message ever repeats what the client sent.
"""

from collections.abc import Mapping

import msgspec

RETRY_AFTER_MAX_S = 60
"""Clients refuse, or used to ignore, a longer wait."""


class ApiError(Exception):
    """Root of the tree. `status` is the HTTP status, `type` and `code` are OpenAI's fields."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.headers: dict[str, str] = dict(headers or {})

    def body(self) -> bytes:
        """The JSON envelope `{"error": {message, type, param, code}}`."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"

    def __init__(self, param: str, what: str | None = None) -> None:
        super().__init__(f"{what or param} is not supported by this server.", param=param)


class ContextLengthExceeded(InvalidRequest):
    """`prompt_tokens` is exact unless `at_least`: then the text was too long to be worth counting."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_context: int, *, param: str, at_least: bool = False) -> None:
        amount = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
        super().__init__(
            f"This model's maximum context length is {max_context} tokens, one of them for the answer. "
            f"However, your prompt has {amount} tokens. Please shorten it.",
            param=param,
        )


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"

    def __init__(self, served: str) -> None:
        super().__init__(f"The model does not exist on this server; it serves '{served}'.", param="model")


class KeyInUrl(InvalidRequest):
    code = "key_in_url"

    def __init__(self) -> None:
        super().__init__("A key does not belong into a URL: send it as 'Authorization: Bearer <key>'.")


class InvalidApiKey(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, message: str = "Missing or wrong API key: send it as 'Authorization: Bearer <key>'.") -> None:
        super().__init__(message, headers={"www-authenticate": "Bearer"})


class HostNotAllowed(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "host_not_allowed"

    def __init__(self) -> None:
        super().__init__("This listener does not answer to that host name; see --ops-allowed-hosts.")


class CrossOrigin(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "cross_origin"

    def __init__(self) -> None:
        super().__init__("This listener takes requests from its own pages only; a program sends the key and no Origin.")


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"

    def __init__(self) -> None:
        super().__init__("There is no such route on this server.")


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This route answers only to {allowed}.", headers={"allow": allowed})


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"

    def __init__(self, limit_mib: int) -> None:
        # The rest of the body is not read, so the connection cannot be used again.
        super().__init__(f"The request body is over the limit of {limit_mib} MiB.", headers={"connection": "close"})


class BodyTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"

    def __init__(self, silence_s: float) -> None:
        # What may still come belongs to this request, so the connection cannot be used again.
        super().__init__(
            f"The request body stopped: nothing came for {silence_s:g} s.", headers={"connection": "close"}
        )


class Busy(ApiError):
    """The same request may be sent again after `retry_after_s` (rounded up, at most a minute)."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        seconds = min(max(1, -int(-retry_after_s // 1)), RETRY_AFTER_MAX_S)
        super().__init__(message, code=code, headers={"retry-after": str(seconds), "x-should-retry": "true"})


class QueueFull(Busy):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str = "Too many requests are waiting.", *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class TooManyLogins(Busy):
    status = 429
    type = "rate_limit_error"
    code = "too_many_logins"

    def __init__(self, *, retry_after_s: float) -> None:
        super().__init__("Too many logins have failed.", retry_after_s=retry_after_s)


class Draining(Busy):
    code = "draining"

    def __init__(self) -> None:
        super().__init__("The server is shutting down and takes no new requests.", retry_after_s=10)


class EngineLoading(Busy):
    code = "engine_loading"

    def __init__(self, *, retry_after_s: float = 2.0) -> None:
        super().__init__("The model is being loaded.", retry_after_s=retry_after_s)


class EngineUnavailable(Busy):
    code = "engine_unavailable"

    def __init__(self, message: str = "The engine is not available.", *, retry_after_s: float = 10.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class EngineStuck(Busy):
    code = "engine_stuck"

    def __init__(self) -> None:
        super().__init__("The last engine has not ended although it was killed.", retry_after_s=RETRY_AFTER_MAX_S)


class DevicePressure(Busy):
    code = "device_pressure"

    def __init__(self) -> None:
        super().__init__("A device has no memory left for more requests.", retry_after_s=30)


class RequestTimedOut(ApiError):
    status = 504
    type = "server_error"
    code = "request_timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request took longer than the limit of {limit_s:g} seconds.")


class GenerationFailed(ApiError):
    """`code` is the engine's own word for it (a metric label)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message, code=code)


class ShutDown(ApiError):
    status = 503
    type = "server_error"
    code = "shut_down"

    def __init__(self) -> None:
        super().__init__("The server was stopped before this answer was complete.")


class InternalError(ApiError):
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server failed to handle the request.")

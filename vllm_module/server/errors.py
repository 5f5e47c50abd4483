"""Errors of requests, in the shape of the protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm_module.base.messages import describe_error
from vllm_module.errors import EngineBusyError, ModelNotReadyError

# What errors of the engine say to callers in Python, and what clients of a server read instead.
_IN_HTTP = {
    "give truncate=True": "give truncate_prompt_tokens: -1",
    "tokenization_kwargs should keep": "truncate_prompt_tokens should keep",
    "LLM.embed returns": "/v1/embeddings returns",
    "call generate, or load": "ask /v1/completions, or serve",
    "wake_up() first": "ask /wake_up first",
    "wake_up(tags=['weights'])": "ask /wake_up?tags=weights",
    "are no embeddings: use classify or score": "are no embeddings",
}


class ApiError(Exception):
    """A request is refused or failed; ``param`` is the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 403: "permission_error"}.get(self.status, kind)
        entries = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": entries}


def loading() -> ApiError:
    """Return the refusal of a request before the model is loaded."""
    return ApiError(503, "the model is loading: try again later", code="loading")


def as_api_error(error: BaseException) -> ApiError:
    """Return what a client is told of an error: its own mistakes are 400, the engine's 5xx.

    A request is cancelled if it takes longer than a server that stops allows.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusyError):
        return ApiError(503, str(error), code="engine_overloaded")
    if isinstance(error, ModelNotReadyError):
        return ApiError(503, in_http(str(error)), code="not_ready")
    if isinstance(error, ValueError):
        return ApiError(400, in_http(str(error)))
    if isinstance(error, asyncio.CancelledError):
        stopped = "the server has stopped, before the end of this request: send it again"
        return ApiError(503, stopped)
    return ApiError(500, describe_error(error))


def in_http(message: str) -> str:
    """Return a message of the engine with the names of paths and fields for those of Python."""
    for ours, theirs in _IN_HTTP.items():
        message = message.replace(ours, theirs)
    return message


def field_error(error: ValueError) -> ApiError:
    """Return a refusal whose message begins with the name of a field, which becomes ``param``."""
    message = str(error).partition("\n")[0]
    name = message.partition(" ")[0].partition("[")[0].rstrip(":")
    return ApiError(400, message, name if name.isidentifier() else None)

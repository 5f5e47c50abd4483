"""The ASGI application: its routes, and the errors of requests that no route answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_module.server import choices, messages, operations, responses, tokens
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Endpoint, Handler, HandlerEndpoint, Keys, Right
from vllm_module.server.errors import ApiError
from vllm_module.server.json_body import json_response
from vllm_module.server.page import page
from vllm_module.server.state import State

# Those of text come first, because they are tried in turn.
ROUTES: tuple[tuple[str, str, Right, Handler], ...] = (
    ("POST", "/v1/completions", "api", choices.completions),
    ("POST", "/v1/chat/completions", "api", choices.chat_completions),
    ("POST", "/v1/responses", "api", responses.responses),
    ("POST", "/v1/messages", "api", messages.messages),
    ("POST", "/v1/messages/count_tokens", "api", messages.count_tokens),
    ("POST", "/v1/embeddings", "api", tokens.embeddings),
    ("POST", "/tokenize", "api", tokens.tokenize),
    ("POST", "/detokenize", "api", tokens.detokenize),
    ("GET", "/health", "open", operations.health),
    ("GET", "/ready", "open", operations.ready),
    ("GET", "/version", "open", operations.version),
    ("GET", "/metrics", "open", operations.metrics),
    ("GET", "/v1/models", "api", operations.models),
    ("GET", "/summary", "api", operations.summary),
    ("GET", "/weight_version", "api", operations.weight_version),
    ("GET", "/get_world_size", "api", operations.world_size),
    ("GET", "/server_info", "api", operations.server_info),
    ("POST", "/reset_prefix_cache", "admin", operations.reset_prefix_cache),
    ("POST", "/pause", "admin", operations.pause),
    ("POST", "/resume", "admin", operations.resume),
    ("POST", "/sleep", "admin", operations.sleep),
    ("POST", "/wake_up", "admin", operations.wake_up),
    ("GET", "/is_sleeping", "api", operations.is_sleeping),
    ("POST", "/update_weights", "admin", operations.update_weights),
    ("POST", "/v1/load_lora_adapter", "admin", operations.load_adapter),
    ("POST", "/v1/unload_lora_adapter", "admin", operations.unload_adapter),
    ("POST", "/abort", "admin", operations.abort),
)


def opened_to(application: Any, origins: Sequence[str]) -> Any:
    """Return an application that pages of these origins may ask, too; ``*`` is every one."""
    return CORSMiddleware(application, origins, allow_methods=["*"], allow_headers=["*"])


def application(state: State, keys: Keys, limits: Limits) -> Starlette:
    """Return the application of a server."""
    return routed(HandlerEndpoint, state, keys, limits)


def routed(endpoint: type[Endpoint], state: Any, keys: Keys, limits: Limits) -> Starlette:
    """Return an application with an endpoint for each path, and the page."""
    routes = [
        Route(path, endpoint(path, right, handler, state, keys, limits), methods=[method])
        for method, path, right, handler in ROUTES
    ]
    routes.append(Route("/", page(), methods=["GET"]))
    return Starlette(
        routes=routes,
        middleware=[Middleware(_WithoutHost)],
        exception_handlers={HTTPException: unanswered},
    )


class _WithoutHost:
    """Takes scheme and host off the target of a request, which clients of a proxy send."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if found := re.match("https?://[^/]*", scope["path"], re.IGNORECASE):
            scope = {**scope, "path": scope["path"][found.end() :] or "/"}
        await self._app(scope, receive, send)


async def unanswered(request: Request, error: Exception) -> Response:
    """Answer what no route does: another path, or another method."""
    assert isinstance(error, HTTPException)
    message = {
        404: "there is no such path: /v1/models, /v1/completions and others are in the docs",
        405: f"this path has no {request.method}",
    }.get(error.status_code, error.detail)
    return json_response(
        ApiError(error.status_code, message).body, error.status_code, error.headers
    )

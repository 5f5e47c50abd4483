"""The page at ``/``: one file, whose script shows what the other paths answer."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from starlette.responses import HTMLResponse


def page() -> HTMLResponse:
    """Return the page, with a policy by which a browser runs only its own script.

    The page is the same for everyone, and has nothing of the model.
    """
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    sources = {
        "default-src": "'none'",
        "script-src": _digest(text, "script"),
        "style-src": _digest(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # text that becomes markup is an error
    }
    headers = {
        "Content-Security-Policy": "; ".join(" ".join(each) for each in sources.items()),
        "Cache-Control": "no-cache",  # another version of the server has another page
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(text, headers=headers)


def _digest(text: str, element: str) -> str:
    """Return the digest of what is in an element, as a policy has it."""
    inside = text.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"

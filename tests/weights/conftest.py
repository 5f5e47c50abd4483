from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteFile = Callable[..., Path]


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    """Write a safetensors file by hand, so that any part of it can be wrong."""

    def write(
        header: dict[str, Any] | bytes, data: bytes = b"", *, length: int | None = None
    ) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        declared = len(text) if length is None else length
        path = tmp_path / "hand.safetensors"
        path.write_bytes(declared.to_bytes(8, "little") + text + data)
        return path

    return write

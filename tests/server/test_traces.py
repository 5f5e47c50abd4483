"""OpenTelemetry's own instrumentation of the server: a span for each request."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.instrumentation.starlette")
SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
TRACE, PARENT, KEY = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "sk-that-is-secret"


def test_a_request_is_a_span(
    folder: Path, tmp_path: Path, until: Callable[[Callable[[], object]], None]
) -> None:
    """It is of the client's trace, and says nothing of keys, prompts and answers."""
    url = f"http://127.0.0.1:{SUPPORT['free_port']()}"
    with (tmp_path / "spans").open("w") as spans:
        process = subprocess.Popen(
            [sys.executable, str(Path(sys.executable).with_name("opentelemetry-instrument")),
             sys.executable, "-m", "vllm_module.cli", "serve", str(folder), "--device", "cpu",
             "--port", url.rpartition(":")[2]],
            stdout=spans, stderr=subprocess.DEVNULL,
            env=os.environ | {
                "OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none",
                "OTEL_LOGS_EXPORTER": "none", "VLLM_MODULE_API_KEY": KEY,
            },
        )  # fmt: skip

    def lives() -> bool:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=60):
                return True
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return False

    try:
        until(lives)
        body = {"model": str(folder), "prompt": "a prompt of mine", "max_tokens": 2}
        headers = {
            "Authorization": f"Bearer {KEY}", "Content-Type": "application/json",
            "traceparent": f"00-{TRACE}-{PARENT}-01",
        }  # fmt: skip
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
    finally:
        process.terminate()  # which writes the last spans
        assert process.wait() == 0
    written = (tmp_path / "spans").read_text()
    span = next(
        part for part in written.split("\n}\n") if '"SpanKind.SERVER"' in part and TRACE in part
    )
    found = json.loads(span + "}")
    assert (found["name"], found["parent_id"]) == ("POST /v1/completions", f"0x{PARENT}")
    assert found["attributes"]["http.status_code"] == 200
    assert KEY not in written
    assert "of mine" not in written

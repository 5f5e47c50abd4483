"""A server that sleeps, as RL rollouts have it do while the trainer needs the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

ADMIN = "sk-admin"


@pytest.fixture(autouse=True)
def _awake(server: Any) -> Iterator[None]:
    """Leave the server awake, which other tests use, too."""
    yield
    server.ask("POST", "/wake_up", key=ADMIN)


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_wakes_up(server: Any, level: int) -> None:
    """As vLLM's clients ask for it; it answers as before, and meanwhile says what to do."""
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 8}

    def refused(path: str, body: Any = None, key: str | None = ADMIN) -> tuple[int, str]:
        code, answer = server.ask("POST", path, body, key)
        return code, answer["error"]["message"]

    before = server.ask("POST", "/v1/completions", body)[1]["choices"]
    assert server.ask("GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert refused("/sleep?level=3")[0] == 400
    assert refused("/sleep?level=1&level=2")[0] == refused("/sleep", {"level": {}})[0] == 400
    assert refused("/sleep", key="sk-two")[0] == 401
    assert server.ask("POST", f"/sleep?level={level}&mode=wait", key=ADMIN)[0] == 200
    assert server.ask("GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert server.ask("GET", "/ready")[0] == 503
    code, said = refused("/v1/completions", body, "sk-two")
    assert (code, "the engine sleeps: ask /wake_up first" in said) == (503, True)
    assert server.ask("POST", f"/sleep?level={level}", key=ADMIN) == (200, {"status": "sleeping"})
    asks_first = "the engine sleeps already: ask /wake_up first"
    assert refused(f"/sleep?level={3 - level}") == (409, asks_first)
    assert refused("/wake_up", {"tags": ["kv_cache", "cache"]})[0] == 400
    code, said = refused("/wake_up?tags=kv_cache")
    assert (code, "ask /wake_up?tags=weights first" in said) == (503, True)
    assert server.ask("POST", "/wake_up?tags=weights", key=ADMIN) == (200, {"status": "sleeping"})
    assert refused("/v1/completions", body, "sk-two")[0] == 503
    assert refused(f"/sleep?level={level}") == (409, asks_first)
    both = "/wake_up?tags=weights&tags=kv_cache"
    assert server.ask("POST", both, key=ADMIN) == (200, {"status": "awake"})
    assert server.ask("GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert server.ask("POST", "/v1/completions", body)[1]["choices"] == before
    assert server.ask("POST", "/sleep", {"level": level}, ADMIN)[0] == 200
    assert server.ask("POST", "/wake_up", key=ADMIN)[0] == 200
    assert server.ask("POST", "/v1/completions", body)[1]["choices"] == before

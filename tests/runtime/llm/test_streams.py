"""Text as it is generated."""

from __future__ import annotations

import runpy
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vllm_module import LLM
from vllm_module.runtime.outputs import RequestOutput

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
SMALL, generated, greedy = (ASKING[name] for name in ("SMALL", "generated", "greedy"))


def test_a_stream_grows_token_by_token(llm: LLM) -> None:
    """Streams taken in turns yield growing text, and end with the text of ``generate``."""
    expected = {p: llm.generate(p, greedy(10), False)[0].outputs[0] for p in ("cat", "dog")}
    streams = {prompt: llm.stream(prompt, greedy(10)) for prompt in expected}
    texts: dict[str, list[str]] = {prompt: [] for prompt in expected}
    while streams:
        for prompt in list(streams):
            output = next(streams[prompt], None)
            if output is None:
                del streams[prompt]
            else:
                texts[prompt].append(output.outputs[0].text)
    for prompt, pieces in texts.items():
        assert pieces[-1] == expected[prompt].text
        assert len(pieces) > 3
        assert all(late.startswith(early) for early, late in pairwise(pieces))


def test_a_stream_yields_no_output_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output has more tokens than the last, wherever another thread's step comes between."""
    take = llm._output

    def step() -> None:
        if llm.engine.lock.acquire(blocking=False):
            try:
                llm.engine.step()
            finally:
                llm.engine.lock.release()

    def output(request: Any) -> RequestOutput:
        """Have another thread add a token now, if it can."""
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return take(request)

    monkeypatch.setattr(llm, "_output", output)
    outputs = list(llm.stream("fox", greedy(9, ignore_eos=True)))
    lengths = [len(each.outputs[0].token_ids) for each in outputs]
    assert lengths == sorted(set(lengths))
    assert [each.finished for each in outputs] == [length == 9 for length in lengths]


def test_a_stream_shows_no_part_of_a_stop_string(llm: LLM) -> None:
    """Text that may be the beginning of a stop string is held back."""
    text = llm.generate("once", greedy(30, ignore_eos=True), False)[0].outputs[0].text
    params = greedy(30, ignore_eos=True, stop=["never!", text[7:10]])
    pieces = [output.outputs[0].text for output in llm.stream("once", params)]
    assert pieces[-1] == text[: text.index(text[7:10])]
    assert all(pieces[-1].startswith(piece) for piece in pieces)


def test_a_closed_stream_is_aborted(llm: LLM) -> None:
    """Closing a stream frees its pages."""
    stream = llm.stream("once upon", greedy(50))
    next(stream)
    assert llm.engine.requests
    stream.close()
    assert not llm.engine.requests
    pool = llm.engine.scheduler.pool
    assert pool.free_pages == pool.num_pages


def test_a_stream_needs_no_tokenizer(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    with LLM(tmp_path, **SMALL) as llm:
        *_, last = llm.stream({"prompt_token_ids": [1, 2, 3]}, greedy(4))
        assert last.outputs[0].token_ids == generated(theirs, [1, 2, 3], 4)

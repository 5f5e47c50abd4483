"""A body is read once it is known to have few JSON values, which are counted first."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.server import json_body
from vllm_module.server.errors import ApiError
from vllm_module.server.json_body import encoded, looked_over, read_json

# Texts that look like what is counted, and end in runs of backslashes.
texts = st.text(alphabet='",[]{}:\\ é\n', max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def begun(value: Any) -> int:
    """Return how many values there are, and one more for each empty list or object."""
    if isinstance(value, (list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + (sum(map(begun, inner)) or 1)
    return 1


@settings(deadline=None, max_examples=300)
@given(values, st.booleans(), st.sampled_from([2, 4, 6, 64, 1 << 16]))
def test_values_are_counted_as_python_reads_them(value: Any, ascii: bool, piece: int) -> None:
    """Whatever is in texts, and wherever a piece ends."""
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_PIECE", piece)  # so that small bodies have many edges
        assert looked_over(data)[0] == begun(json.loads(data))


@pytest.mark.parametrize("edge", range((1 << 16) - 6, (1 << 16) + 6))
@pytest.mark.parametrize("run", [rb"\\", rb"\"", rb"\\\"", rb"\\\\\"", rb"\\\\"])
def test_edges_of_real_pieces(edge: int, run: bytes) -> None:
    """A run of backslashes that crosses an edge is read as one."""
    head = b'["'
    data = head + b"x" * (edge - len(head)) + run + b'", 1, {"a,": [2]}]'
    assert looked_over(data)[0] == begun(json.loads(data)) == 6


class Pieces(bytes):
    """A body that counts how often a part of it is taken."""

    taken = 0

    def __getitem__(self, part: Any) -> Any:
        self.taken += 1
        assert self.taken < 10, "it is looked over without an end"
        return super().__getitem__(part)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("before", [1, (1 << 16) - 1, 1 << 16])
def test_backslashes_at_the_end_of_a_body_are_its_end(count: int, before: int) -> None:
    """What they stand before never comes."""
    assert looked_over(Pieces(b'"' * before + b"\\" * count)) == (1, False)


def test_the_limit_is_exact() -> None:
    """As many values as are allowed are read, and one more is not, in bodies of any size."""
    for most in (3, 1000, 70_000, 262_144):
        whole = json.dumps(["a,b"] * (most - 1)).encode()
        assert len(read_json(whole, most)) == most - 1
        with pytest.raises(ApiError, match=f"more than {most} JSON values") as refused:
            read_json(json.dumps(["a,b"] * most).encode(), most)
        assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_texts_have_no_limit_but_the_bodys() -> None:
    text = 'a,[{"\\' * 200_000
    assert read_json(json.dumps({"prompt": text}).encode(), 10) == {"prompt": text}


def numbers_of_every_kind() -> list[tuple[bytes, bool]]:
    """Return numbers on both sides of the largest float, and whether Python has each infinite."""
    written = [f"{'1' * n}.5" for n in (1, 63, 64, 127, 128, 200, 308, 309, 310, 400)]
    written += [f"1{sign}{n}" for sign in ("e", "E", "e+", "e-") for n in (0, 9, 307, 308, 309)]
    written += ["-1e999", f"0.{'0' * 300}1", f"-{'9' * 309}.0", f"{'7' * 200}e200"]
    return [(each.encode(), math.isinf(float(each))) for each in written]


@pytest.mark.parametrize("before", [0, (1 << 16) - 300, (1 << 16) - 64, (1 << 16) - 2, 1 << 17])
def test_an_infinite_number_is_found_wherever_pieces_end(before: int) -> None:
    """The expected answer is Python's, for bodies of one piece and of several."""
    for number, infinite in numbers_of_every_kind():
        text = b'"' + b"e" * before + b'1e999"'  # no number
        body = (
            b'{"a": [true, ' + text + b", " + number + b", 1], " + b'"b": "' + b"9" * 70_000 + b'"}'
        )
        refused = ""
        try:
            read_json(body, 1000)
        except ApiError as error:
            refused = error.message
        assert ("too large for a float" in refused) == infinite, number


def test_most_large_bodies_are_not_written_again_to_find_infinities() -> None:
    """Texts and token ids have none, whatever looks like one within a text."""
    ids = json.dumps({"prompt": [123456] * 40_000}).encode()
    text = json.dumps({"prompt": "1e999 " + "9" * 100_000, "stream": False, "n": 1.5}).encode()
    assert [looked_over(each)[1] for each in (ids, text)] == [False, False]


@settings(deadline=None, max_examples=300)
@given(values, st.sampled_from([1, 2, 3, 5, 1000]), st.sampled_from([1, 8, 1 << 16]))
def test_what_is_encoded_in_parts_is_the_whole(value: Any, at_once: int, piece: int) -> None:
    """Python's own encoder, which encodes all of it at once, has the same bytes."""
    with pytest.MonkeyPatch.context() as patch:
        # So that small values have many parts, and these many pieces.
        patch.setattr(json_body, "_AT_ONCE", at_once)
        patch.setattr(json_body, "_PIECE", piece)
        for each in (value, {"a": [value, (value, 1.5)]}):
            whole = json.dumps(each, ensure_ascii=False, separators=(",", ":"))
            assert asyncio.run(encoded(each)) == whole.encode()


LARGE: dict[str, Any] = {
    "lists": {"tokens": ["ab"] * 200_000},
    "objects": {"choices": [{"logprobs": [{"a": {"b": 1}}] * 1000}] * 100},
    "an object": {str(number): [number] for number in range(100_000)},
    "vectors": {"data": [{"embedding": [0.1] * 1000}] * 200},
}


@pytest.mark.parametrize("what", LARGE)
def test_others_run_while_a_large_value_is_encoded(what: str) -> None:
    """No part has many values, and between pieces the event loop has its turn."""

    async def turns() -> int:
        count, task = 0, asyncio.ensure_future(encoded(LARGE[what]))
        while not task.done():
            await asyncio.sleep(0)
            count += 1
        assert await task == json.dumps(LARGE[what], separators=(",", ":")).encode()
        return count

    parts = [*json_body._parts(LARGE[what])]
    assert max(map(len, parts)) < 1 << 15
    assert asyncio.run(turns()) >= sum(map(len, parts)) // (1 << 17)

"""Mutations that keep most of a checkpoint valid, so that fuzzing reaches code after the JSON."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

CUT = b"\n---\n"
DTYPES = ["U8", "I8", "BOOL", "F16", "BF16", "I32", "F32", "F64", "C64", "F8_E4M3", "F4", "", "u8"]
NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    64,
    255,
    -1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
]
OTHERS: list[Any] = [None, True, False, 1.0, -0.0, 1e300, "", "x", [], {}, [[]], {"": 0}, "\ud800"]
NAMES = ["w", "v", "", "__metadata__", "a.b", "\0", "\ud800", "é", "\x1b[2J", "weight.__class__"]
FILES = ["a.safetensors", "b.safetensors", "c.safetensors", "../a.safetensors", "/etc/passwd", ""]
# Text that json.dumps does not write.
TEXTS = ["-0", "1e3", "NaN", "Infinity", "0x1", "01", "9" * 400, "[" * 2000, "\\ud800", "\\u0000"]
HEADERS = [
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Content-Encoding: gzip",
    b"Content-Encoding: ",
    b"Content-Length: 8",
    b"Content-Length: 08, 8",
    b"Content-Length: +8",
    b"Content-Range: bytes 4-11/20",
    b"Content-Range: bytes 4-5/6",
    b"Content-Type: text/html",
    b"Connection: close",
    b"Location: /other",
    b"Location: http://elsewhere/?HIDDEN",
    b"HTTP/1.1 100 Continue",
    b"Retry-After: 9" + b"9" * 8,
    b'ETag: "\x1b[2J\xff"',
    b" folded",
    b"4\r\nabcd\r\n0\r\n",
]
# Fields of requests, with values that they may have.
FIELDS: list[tuple[str, list[Any]]] = [
    ("prompt", ["a", [1, 2], ["a", "b"], [[1], [2]], "a" * 70]),
    ("model", ["tiny", "gpt-4"]),
    ("stream", [True]),
    ("stream_options", [{"include_usage": True}]),
    ("max_tokens", [0, 1, 5]),
    ("n", [2]),
    ("stop", ["a", ["a", "b"], [""]]),
    ("logprobs", [True, 2]),
    ("top_logprobs", [2]),
    ("echo", [True]),
    ("logit_bias", [{"5": 100}, {"x": 1}, {"5": 1e308}]),
    ("temperature", [0, 2.0, 1e-300]),
    ("top_p", [0.5]),
    ("seed", [3]),
    ("bad_words", [["a"]]),
    ("messages", [[{"role": "user", "content": "a"}]]),
    ("role", ["user", "assistant", "system", "tool", "developer"]),
    ("content", ["a", [{"type": "text", "text": "a"}], [{"type": "image_url"}]]),
    ("type", ["text", "function", "image", "tool_use", "tool_result", "json_schema", "message"]),
    ("tools", [[{"type": "function", "function": {"name": "f", "parameters": {}}}]]),
    ("tool_choice", ["auto", "none", "required", {"type": "any"}, {"type": "tool", "name": "f"}]),
    (
        "tool_calls",
        [[{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]],
    ),
    ("tool_call_id", ["x"]),
    ("response_format", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}]),
    ("structured_outputs", [{"regex": "a|b"}, {"choice": ["a"]}, {"json": {"type": "integer"}}]),
    ("reasoning_effort", ["low"]),
    ("chat_template_kwargs", [{"x": 1}, {"messages": 1}]),
    ("system", ["a", [{"type": "text", "text": "a"}]]),
    ("input", ["a", [{"role": "user", "content": "a"}], [{"type": "function_call_output"}]]),
    ("instructions", ["a"]),
    ("text", [{"format": {"type": "json_object"}}, "a"]),
    ("user", ["a"]),
    ("metadata", [{"a": "b"}]),
    ("cache_salt", ["a"]),
    ("tokens", [[1, 2]]),
]
WIDTHS = {"F64": 8, "C64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}

Mutate = Callable[[bytes, int], bytes]


def mutate_file(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate a safetensors file: its header as JSON, its layout, its text or its bytes."""
    rng = Random(seed)
    header, rest = data[8:], b""
    length = int.from_bytes(data[:8], "little")
    if length <= len(header):
        header, rest = header[:length], header[length:]
    kind = rng.randrange(8)
    if kind == 0:
        return blind(data, most)
    try:
        tree = json.loads(header)
        assert isinstance(tree, dict)
    except (ValueError, AssertionError, RecursionError):
        tree = {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    if kind <= 2:
        rest = lay_out(tree, rng)
    elif kind == 3:
        rest = blind(rest, 64) if rest else b"1234"
    else:
        change(tree, rng)
        if kind >= 6:
            rest = lay_out(tree, rng)
    text = json.dumps(tree).encode()
    if kind == 5:
        text = rewrite(text, rng) if rng.random() < 0.5 else blind(text, most)
    return (len(text).to_bytes(8, "little") + text + rest)[:most]


def mutate_gguf(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate a GGUF file: one of its numbers, a repeated part, its length or its bytes."""
    rng = Random(seed)
    kind = rng.randrange(6)
    if kind == 0 or len(data) < 32:
        return blind(data, most)
    at, width = rng.randrange(len(data)), rng.choice([1, 2, 4, 8])
    if kind == 1:
        return data[:at]
    if kind == 2:
        return (data[: at + width] + data[at:])[:most]
    number = rng.choice(NUMBERS) % (1 << 8 * width)
    return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def mutate_folder(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate a file of a folder, or make the index match the files."""
    rng = Random(seed)
    parts = [*data.split(CUT, 2), b"", b""][:3]
    kind = rng.randrange(4)
    if kind == 0:
        parts[0] = mutate_json(parts[0], most, seed, blind)
    else:
        at = rng.choice([1, 2])
        parts[at] = mutate_file(parts[at], most // 3, seed, blind)
        if kind > 1:
            weight_map = {}
            for part, name in ((parts[1], FILES[0]), (parts[2], FILES[1])):
                length = int.from_bytes(part[:8], "little")
                try:
                    names = json.loads(part[8 : 8 + length])
                    weight_map |= {n: name for n in names if n != "__metadata__"}
                except (ValueError, TypeError, RecursionError):
                    continue
            if kind == 3 and weight_map:
                weight_map[rng.choice([*weight_map, *NAMES])] = rng.choice(FILES)
            parts[0] = json.dumps({"weight_map": weight_map}).encode()
    return CUT.join(parts)[:most]


def mutate_torch(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate a file of torch.save: its bytes, or those of one member of its archive."""
    rng = Random(seed)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {member.filename: archive.read(member) for member in archive.infolist()}
    except Exception:  # of several kinds, from a damaged archive
        return blind(data, most)
    kind = rng.randrange(4)
    if kind == 0 or not members:
        return blind(data, most)
    pickles = [name for name in members if name.endswith("data.pkl")]
    name = rng.choice(pickles if pickles and kind > 1 else list(members))
    members[name] = rewrite(members[name], rng) if kind == 3 else blind(members[name], most // 2)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, held in members.items():
            archive.writestr(zipfile.ZipInfo(name), held)
    return written.getvalue()[:most]


def mutate_npcache(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate the list of names, or the header or the elements of a file."""
    rng = Random(seed)
    parts = [*data.split(CUT, 2), b"", b""][:3]
    at = rng.randrange(3)
    if at == 0:
        parts[0] = mutate_json(parts[0], most // 3, seed, blind)
    elif rng.randrange(3) == 0:
        parts[at] = blind(parts[at], most // 3)
    else:
        length = int.from_bytes(parts[at][8:10], "little")
        text = rewrite(parts[at][10 : 10 + length], rng)
        begin = parts[at][:8] + len(text).to_bytes(4, "little")[:2]
        parts[at] = begin + text + parts[at][10 + length :]
    return CUT.join(parts)[:most]


def mutate_dcp(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate a pickle as bytes, or change a number or a name in it."""
    rng = Random(seed)
    places = [at for at, byte in enumerate(data[:-1]) if byte in b"KMX\x8c"]
    if not places or rng.randrange(3) == 0:
        return blind(data, most)
    at = rng.choice(places) + 1
    return (data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :])[:most]


def mutate_json(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate JSON as a tree, as text or as bytes."""
    rng = Random(seed)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return blind(data, most)
    kind = rng.randrange(6)
    if kind == 0:
        return blind(data, most)
    change(tree, rng)
    text = json.dumps(tree).encode()
    return (rewrite(text, rng) if kind == 1 else text)[:most]


def mutate_http(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate answers: a header, a number, a line, or bytes; answers may change places."""
    rng = Random(seed)
    parts = data.split(CUT)
    at = rng.randrange(len(parts))
    kind = rng.randrange(6)
    if kind == 0:
        parts[at] = blind(parts[at], most)
    elif kind == 1:
        parts.insert(at, rng.choice(parts))
    elif kind == 2:
        parts[at] = rewrite(parts[at], rng)
    else:
        lines = parts[at].split(b"\r\n")
        place = rng.randrange(len(lines))
        if kind == 3:
            lines.insert(place + 1, rng.choice(HEADERS))
        elif kind == 4:
            lines[place] = rng.choice([b"", lines[place - 1], lines[place] + b" ", b"\t"])
        else:
            numbers = list(re.finditer(rb"\d+", lines[place]))
            if numbers:
                one = rng.choice(numbers)
                number = str(rng.choice([*NUMBERS, 4, 5, 11, 12, 13, 20, 206])).encode()
                lines[place] = lines[place][: one.start()] + number + lines[place][one.end() :]
        parts[at] = b"\r\n".join(lines)
    return CUT.join(parts)[:most]


def mutate_request(data: bytes, most: int, seed: int, blind: Mutate) -> bytes:
    """Mutate the body of a request: its fields, its depth, its text, its length or its bytes."""
    rng = Random(seed)
    path, _, body = data.partition(b"\n")
    kind = rng.randrange(8)
    if kind == 0:
        body = body[: rng.randrange(len(body) + 1)]
    elif kind == 1:
        body = rewrite(body, rng)
    elif kind == 2:
        body = mutate_json(body, most, seed, blind)
    else:
        try:
            tree = json.loads(body)
        except (ValueError, RecursionError):
            return blind(data, most)
        if not isinstance(tree, dict) or kind == 3:
            change(tree, rng)
        else:
            places = [
                tree,
                *(held for holder, key in _places(tree) if isinstance(held := holder[key], dict)),
            ]
            name, values = rng.choice(FIELDS)
            value = deepcopy(rng.choice([*values, *OTHERS, *NUMBERS]))
            for _ in range(rng.choice([0] * 6 + [1, 5, 100, 300])):
                value = [value] if rng.random() < 0.5 else {rng.choice(NAMES): value}
            rng.choice(places)[name] = value
            if kind > 6:
                change(tree, rng)
        body = json.dumps(tree).encode()
    return (path + b"\n" + body)[:most]


def change(tree: Any, rng: Random) -> None:
    """Change a place or two of a JSON tree."""
    for _ in range(rng.randint(1, 2)):
        places = list(_places(tree))
        if not places:
            return
        holder, key = rng.choice(places)
        action = rng.randrange(6)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[rng.choice(NAMES)] = deepcopy(holder[key])
        elif action == 2 and isinstance(holder, list):
            holder.insert(key, rng.choice(NUMBERS))
        elif action == 3:
            holder[key] = deepcopy(rng.choice(OTHERS))
        elif isinstance(holder[key], str):
            holder[key] = rng.choice(DTYPES + FILES)
        else:
            holder[key] = rng.choice(NUMBERS)


def _places(tree: Any) -> Any:
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def lay_out(tree: dict[str, Any], rng: Random) -> bytes:
    """Set correct offsets for every entry that could be a tensor, and return the data."""
    if rng.random() < 0.3:
        shape = [rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randrange(5))]
        tree[rng.choice(NAMES)] = {"dtype": rng.choice(DTYPES[:10]), "shape": shape}
    end = 0
    for name, entry in tree.items():
        if name == "__metadata__" or not isinstance(entry, dict):
            continue
        nbytes = WIDTHS.get(str(entry.get("dtype")), 1)
        shape = entry.get("shape")
        for size in shape if isinstance(shape, list) else ():
            nbytes *= size if isinstance(size, int) and 0 <= size < 9 else 1
        nbytes = min(nbytes, 512)
        entry["data_offsets"] = [end, end + nbytes]
        end += nbytes
    return bytes(index % 2 for index in range(end))


def rewrite(text: bytes, rng: Random) -> bytes:
    """Change the text where a JSON tree cannot: odd numbers, a repeated part, spaces."""
    at = rng.randrange(len(text) + 1)
    stop = rng.randrange(at, min(len(text), at + 40) + 1)
    action = rng.randrange(4)
    if action == 0:
        return text[:at] + rng.choice(TEXTS).encode() + text[stop:]
    if action == 1:
        digits = [index for index, byte in enumerate(text) if chr(byte).isdigit()]
        at = rng.choice(digits) if digits else at
        return text[:at] + rng.choice(TEXTS).encode() + text[at + 1 :]
    if action == 2:
        return text + b" " * rng.randrange(4)
    return text[:stop] + text[at:stop] + text[stop:]

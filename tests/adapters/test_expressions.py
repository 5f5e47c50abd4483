"""Expressions for modules' names: what ``re`` says, in a bounded number of steps."""

from __future__ import annotations

import contextlib
import random
import re
import time
from itertools import product

import pytest

from vllm_module.adapters import adapter_config
from vllm_module.adapters.expressions import Expression, ModuleName
from vllm_module.errors import UnsupportedModelError

ATOMS = [
    *("a", "b", "ab", "aab", "."),
    *(r"\.", r"\w", r"\W", r"\d", "[ab]", "[^a]", "[^.]", "[]a]", r"[a\].]", r"\x61"),
    *(
        r"\D",
        r"\S",
        r"\s",
        r"\0",
        r"\056",
        r"\u0061",
        r"\U00000062",
        r"\N{FULL STOP}",
        r"[\N{DIGIT ONE}]",
    ),
]
EDGES = ["^", "$", r"\b", r"\B", r"\A", r"\Z"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}", "{0}", "{1,3}?"]


def drawn(draw: random.Random, depth: int = 0) -> str:
    """Return an expression of a few parts."""
    parts = []
    for _ in range(draw.randint(0 if depth else 1, 3)):
        what = draw.random()
        if what < 0.4 or depth > 3:
            part = draw.choice(ATOMS)
        elif what < 0.5:
            parts.append(draw.choice(EDGES))
            continue
        elif what < 0.8:
            kind = draw.choice(["", "?:", f"?P<n{draw.getrandbits(60)}>"])
            part = f"({kind}{drawn(draw, depth + 1)})"
        elif what < 0.9:
            parts.append(f"(?{draw.choice('=!')}{drawn(draw, depth + 1)})")
            continue
        else:
            part = f"(?:{drawn(draw, depth + 1)}|{drawn(draw, depth + 1)})"
        parts.append(part + (draw.choice(REPEATS) if draw.random() < 0.4 else ""))
    return "".join(parts)


@pytest.mark.parametrize("behind_a_dot", [False, True])
def test_drawn_expressions_fit_what_those_of_re_do(behind_a_dot: bool) -> None:
    """2,500 expressions, each on eight names."""
    draw, fitted = random.Random(0), 0
    for _ in range(2500):
        pattern = drawn(draw)
        ours = Expression(pattern, behind_a_dot=behind_a_dot)
        theirs = re.compile(rf"(?:.*\.)?(?:{pattern})" if behind_a_dot else pattern)
        for _ in range(8):
            name = "".join(draw.choices("aab.1", k=draw.randint(0, 4)))
            fits = theirs.fullmatch(name) is not None
            assert ours.fits(ModuleName(name)) == fits, (pattern, name)
            fitted += fits
    assert fitted > 2000


def test_only_digits_of_ascii_count_repetitions() -> None:
    for pattern, name in product(["a{٢}", "a{1,٢}"], ["aa", "a{٢}", "a{1,٢}"]):
        fits = re.fullmatch(pattern, name) is not None
        assert Expression(pattern).fits(ModuleName(name)) == fits


NAME = "model.layers.11.self_attn.q_proj" + ".base_layer" * 8
HOSTILE = [
    ".?" * 26 + "!",
    "(?:.|..)" * 26 + "!",
    "(a+)+$",
    ".*" * 20 + "!",
    "(?:.?){40}!",
    "(.*)*!",
    "((.*)*)*!",
    "(?:(?:.+)+)+!",
    "(?:.|.|.)*!",
    "(?:.{0,9}){0,99}!",
    r"(?:[^.]*\.?)*!",
    "(?:(?:.|..)?){30}!",
    "(?=(?:.|..)*!).*",
    "(?:(?!(?:.|..)*!).)*!",
    "(|.|..)*!",
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_expressions_end_soon(pattern: str) -> None:
    """Each of these takes ``re`` seconds to years for one name."""
    config = adapter_config({"r": 4, "lora_alpha": 8, "target_modules": pattern}, "file")
    start = time.process_time()
    with contextlib.suppress(UnsupportedModelError):  # or it takes too many steps
        assert not config.targets(NAME)
    assert time.process_time() - start < 0.5


def test_too_many_steps_are_refused_by_name() -> None:
    """Conditions on each of many ends; and many expressions, which share the steps."""
    nested = "(?:.(?!" * 5 + "x" + "!))*" * 5 + "!"
    many = {f"(?:(?:.?){{80}}.){{9}}{n}": 4 for n in range(400)}
    for setting in ({"target_modules": nested}, {"rank_pattern": many}):
        config = adapter_config({"r": 4, "lora_alpha": 8, **setting}, "file")
        start = time.process_time()
        with pytest.raises(UnsupportedModelError, match=r"more than 20,000 steps for the module m"):
            assert config.targets(NAME) or config.rank(NAME)
        assert time.process_time() - start < 1


WORDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMPONENTS = ["self_attn", "attention", "attn", "mlp", "feed_forward", "ffn", "dense", "experts"]
TOWERS = ["vision", "image", "visual", "patch", "language", "text"]
REAL = [
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*",
    r"(?:.*?(?:{}).*?(?:{}).*?(?:{}).*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{})\.(?:(?:{})))".format(
        *("|".join(each) for each in (TOWERS, COMPONENTS, WORDS, COMPONENTS, WORDS))
    ),
    r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
    r"model\.layers\.(1[0-9]|2[0-7]|[0-9])\.(self_attn|mlp)\..*_proj",
    r"^(?!.*(?:lm_head|router)).*?\.(?:experts\.\d+\.)?w[123]$",
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    "|".join(rf"model\.layers\.{n}\.mlp\.experts\.{e}\.w1" for n in range(16) for e in range(15)),
]


@pytest.mark.parametrize("pattern", REAL, ids=lambda each: each[:30])
def test_expressions_of_published_adapters(pattern: str) -> None:
    """They choose as ``re`` does, in less than 0.2 ms a module."""
    config = adapter_config({"r": 4, "lora_alpha": 8, "target_modules": pattern}, "file")
    names = [
        f"{tower}{layers}.{number}.{component}.{word}"
        for tower in ("model.", "model.language_model.", "visual.", "decoder.block.")
        for layers in ("layers", "blocks")
        for number in (0, 5, 11, 28)
        for component in (
            *COMPONENTS,
            "SelfAttention",
            "block_sparse_moe.experts.3",
            "mlp.experts.7",
        )
        for word in (*WORDS, "q", "w1", "w3", "router")
    ]
    chosen = [config.targets(name) for name in names]
    assert chosen == [re.fullmatch(pattern, name) is not None for name in names]
    assert 0 < sum(chosen) < len(names)
    start = time.process_time()
    for name in names:
        config.targets(name)
    assert time.process_time() - start < 0.2e-3 * len(names)


@pytest.mark.parametrize(
    "pattern", ["", "layers.{n}.q_proj", r".*\.layers\.{n}\.(self_attn\.)?q_proj"]
)
def test_six_hundred_ranks(pattern: str) -> None:
    """They are compiled once: a module takes less than 5 ms."""
    ranks = {pattern.replace("{n}", str(n)) or f"x{n}": 1 + n for n in range(600)}
    config = adapter_config({"r": 1000, "lora_alpha": 8, "rank_pattern": ranks}, "file")
    names = [f"model.layers.{n}.self_attn.q_proj" for n in range(0, 600, 10)]
    config.rank("of the first call")
    start = time.process_time()
    found = [config.rank(name) for name in names]
    assert time.process_time() - start < 5e-3 * len(names)
    expected = [1000] * 60 if not pattern or pattern[0] == "l" else [*range(1, 600, 10)]
    assert found == expected

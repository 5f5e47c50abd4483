"""What commands show on terminals of several widths and in a pipe, compared with ``golden/``.

A screen that is the same at several widths is in its file once, below all of them. After a change
that is meant, ``UPDATE_SCREENS=1 pytest tests/cli/test_screens.py`` writes the files again: look at
the difference.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module.build.model_source import ModelSource
from vllm_module.cli import main
from vllm_module.cli.demo.damage import refuse_damaged
from vllm_module.cli.demo.steps import show_plan
from vllm_module.cli.demo.transcript import Transcript
from vllm_module.cli.output import console
from vllm_module.config import ModelConfig

GOLDEN = Path(__file__).with_name("golden")
WIDTHS = (60, 80, 120)
WIDE = 200  # nothing here is folded at this width
CPU = ("--device", "cpu")
IDS = ("--max-new-tokens", "4", *CPU, "--prompt-ids")
CHAT = "hi\n/help\n/hepl\n /hepl\n/reset\nhi\n/quit\n"

# By name: the command line, and its standard input.
SCREENS: dict[str, tuple[tuple[str, ...], str]] = {
    "help": (("--help",), ""),
    **{
        f"help-{command}": ((command, "--help"), "")
        for command in (
            "inspect",
            "plan",
            "load",
            "generate",
            "chat",
            "serve",
            "bench",
            "shard",
            "convert",
            "digest",
            "demo",
        )
    },
    "inspect": (("inspect", "tiny"), ""),
    "inspect-all": (("inspect", "tiny", "--all"), ""),
    "plan-1": (("plan", "tiny"), ""),
    "plan-2": (("plan", "tiny", "--tp", "2", "--memory", "1MB"), ""),
    "plan-8": (("plan", "large", "--tp", "8", "--memory", "80GiB"), ""),
    "plan-quantized": (("plan", "large", "--tp", "8", "--quantization", "fp8"), ""),
    "plan-too-large": (("plan", "large", "--tp", "2", "--memory", "2GB"), ""),
    "inspect-adapter": (("inspect", "adapter"), ""),
    "plan-stages": (("plan", "large", "--tp", "4", "--pp", "2", "--memory", "80GiB"), ""),
    "plan-hosts": (
        ("plan", "large", "--tp", "4", "--pp", "2", "--nodes", "4", "--memory", "80GiB"),
        "",
    ),
    "plan-adapter": (("plan", "tiny", "--tp", "2", "--adapter", "adapter"), ""),
    "load": (("load", "tiny", "--tp", "2", *CPU), ""),
    "generate": (("generate", "tiny", "--prompt", "A tree", *IDS[:-1]), ""),
    "generate-several": (("generate", "tiny", *IDS, "1,2", "--prompt-ids", "500"), ""),
    "bench": (
        ("bench", "tiny", "--input-len", "8", "--output-len", "4", "--num-prompts", "3", *CPU),
        "",
    ),
    "chat": (("chat", "tiny", "--max-new-tokens", "4", *CPU), CHAT),
    "refused-plan": (("plan", "damaged"), ""),
    "refused-load": (("load", "damaged", "--tp", "2", *CPU), ""),
    "refused-file": (("inspect", "cut"), ""),
    "refused-folder": (("load", "/there/is/no/such/folder/with/a/model/of/any/architecture"), ""),
    "refused-size": (("plan", "tiny", "--tp", "3"), ""),
    "usage-command": (("frob",), ""),
    "usage-argument": (("plan",), ""),
    "usage-value": (("generate", "tiny", "--kv-cache-dtype", "int3", "--prompt-ids", "1"), ""),
    "usage-memory": (("plan", "tiny", "--memory", "much"), ""),
}
MEASURED = {"load", "bench"}
NUMBER = re.compile(r"[\d.]+(?:, [\d.]+)? (?:[kMG]?B(?:/s)?|ms|/s|s)\b")


class Screen(io.StringIO):
    """Standard output and standard error, on a terminal or in a pipe."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Keyboard(io.StringIO):
    """Standard input, which a terminal shows as it is typed."""

    def __init__(self, text: str, screen: Screen) -> None:
        super().__init__(text)
        self.screen = screen

    def isatty(self) -> bool:
        return self.screen.terminal

    def readline(self, *_: Any) -> str:
        line = super().readline()
        if self.screen.terminal:
            self.screen.write(line)
        return line


Show = Callable[[Callable[[], object], "int | None", str], str]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Return a function that runs a command and returns its screen; without a width, in a pipe."""

    def call(command: Callable[[], object], width: int | None, typed: str = "") -> str:
        screen = Screen(terminal=width is not None)
        monkeypatch.setenv("TERM", "dumb")  # no colours, and no lines that are drawn again
        monkeypatch.setenv("LINES", "50")
        monkeypatch.setenv("COLUMNS", str(width or 80))
        with monkeypatch.context() as streams:
            # In this process: a pseudo-terminal would need a process, and a torch, for each screen.
            streams.setattr("sys.stdin", Keyboard(typed, screen))
            streams.setattr("sys.stdout", screen)
            streams.setattr("sys.stderr", screen)
            code = command()
        lines = [line.rstrip() for line in screen.getvalue().splitlines()]
        return "\n".join([*lines, *([f"exit code {code}"] if code else [])]) + "\n"

    return call


@pytest.fixture(scope="module")
def checkpoints(
    with_text: Path, write_large: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Make checkpoints below one folder: tiny, damaged, cut off, and large with nothing in it."""
    root = tmp_path_factory.mktemp("screens")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(with_text.glob("*.safetensors")):
        tensors |= load_file(file)
    tensors["lm_head.weight"].zero_()  # then token 0 is generated, whatever torch computes
    damaged = dict(tensors)
    name = "model.layers.1.self_attn.q_proj.weight"
    damaged["model.layers.1.self_attn.q_proj_old.weight"] = damaged.pop(name)
    damaged["model.norm.weight"] = torch.zeros(7)
    for folder, stored in (("tiny", tensors), ("damaged", damaged), ("cut", tensors)):
        (root / folder).mkdir()
        for name in ("config.json", "tokenizer.json"):
            (root / folder / name).write_bytes((with_text / name).read_bytes())
        save_file(stored, root / folder / "model.safetensors")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (root / "tiny" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 1}  # one token can be drawn
    (root / "tiny" / "generation_config.json").write_text(json.dumps(sampling))
    with (root / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 10)
    (root / "adapter").mkdir()
    pairs: dict[str, torch.Tensor] = {}
    for name in [each.removesuffix(".weight") for each in tensors if "q_proj" in each]:
        out_size, in_size = tensors[f"{name}.weight"].shape
        pairs[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(4, in_size)
        pairs[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(out_size, 4)
    save_file(pairs, root / "adapter" / "adapter_model.safetensors")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    (root / "large").mkdir()
    write_large(root / "large", layers=4)
    return root


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show what a machine of two cores shows: the memory to load depends on reading threads."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, show: Show, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each screen is the golden one, fits its terminal, and breaks no word in the middle."""
    arguments, typed = SCREENS[name]
    monkeypatch.chdir(checkpoints)  # paths on the screens are as long everywhere
    screens = {
        width: show(lambda: main(list(arguments)), width, typed) for width in (*WIDTHS, WIDE, None)
    }
    check_screens(name, screens)


def test_screens_of_the_demo(
    show: Show, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's steps that print tables and refusals are the golden ones, and fit."""
    monkeypatch.chdir(checkpoints)
    source = ModelSource.find(ModelConfig(model="tiny"))

    def steps() -> None:
        transcript = Transcript(console())
        show_plan(transcript, source)
        refuse_damaged(transcript, source)

    check_screens("demo", {width: show(steps, width, "") for width in (*WIDTHS, WIDE, None)})


def check_screens(name: str, screens: dict[int | None, str]) -> None:
    for width in WIDTHS:
        assert [line for line in screens[width].splitlines() if len(line) > width] == []
    screens = {width: normalized(name, screen) for width, screen in screens.items()}
    for width in WIDTHS:
        assert broken_words(screens[width], screens[WIDE]) == []
    widths: dict[str, list[str]] = {}  # the widths at which each screen is shown
    for width in (*WIDTHS, None):
        widths.setdefault(screens[width], []).append(f"{width} columns" if width else "pipe")
    shown = "".join(f"=== {', '.join(equal)}\n{screen}" for screen, equal in widths.items())
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        golden.write_text(shown)
    assert shown == golden.read_text(), "see the top of this file"


def normalized(name: str, screen: str) -> str:
    """Replace what differs from run to run: progress bars, and what is measured."""
    screen = re.sub("^(.*?)━.*$", r"\1━ #", screen, flags=re.MULTILINE)
    if name in MEASURED:
        screen = re.sub(" {2,}", "  ", NUMBER.sub("#", screen))
    return screen


def broken_words(screen: str, whole: str) -> list[str]:
    """Return words of ``screen`` that are parts of words in ``whole``, cut between two letters."""
    words = set(whole.split())
    return [
        part
        for part in set(screen.split()) - words
        if not set(part) & set("━│#")
        and not any(
            word[start - 1] in "./,_-" or start == 0
            for word in words
            for start in starts(word, part)
            if start + len(part) == len(word) or part[-1] in "./,_-"
        )
    ]


def starts(word: str, part: str) -> list[int]:
    return [start for start in range(len(word)) if word.startswith(part, start)]


def test_a_word_that_is_cut_is_found() -> None:
    """The check accepts parts that end at a dot, and no others."""
    whole = "model.layers.weight 1024"
    assert broken_words("model.\nlayers.weight\n1024", whole) == []
    assert sorted(broken_words("model.lay\ners.weight\n10\n24", whole)) == sorted(
        ["model.lay", "ers.weight", "10", "24"]
    )


def test_no_golden_file_is_left_over() -> None:
    """Each golden file belongs to a screen."""
    assert {path.stem for path in GOLDEN.iterdir()} == {*SCREENS, "demo"}

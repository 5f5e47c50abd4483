"""Checkpoints in published 8-bit layouts, each written once, and the command line."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import settings
from safetensors.torch import save_file
from transformers.utils import logging

from vllm_module.cli import main
from vllm_module.kernels.matmul import gguf_blocks

Tensors = dict[str, torch.Tensor]

layouts = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("layouts.py"))))
publishing = layouts.publishing


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(params=layouts.NAMES)
def layout(request: pytest.FixtureRequest) -> str:
    """Each name of a layout in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def _quiet() -> Iterator[None]:
    """Draw no progress bars, and give torch one thread: two simulated ranks compete for more."""
    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQDM_DISABLE", "1")
        yield
    torch.set_num_threads(before)
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def published(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the checkpoint of a layout by its name; each is written once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name in layouts.BY_HAND:
                source, scheme, shape = layouts.BY_HAND[name]
                made[name] = publishing.by_hand(folder, get(source), scheme, shape)
            else:
                made[name] = layouts.EXPORTS[name](folder)
        return made[name]

    return get


@pytest.fixture(scope="session")
def full_precision(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint in full precision, as transformers saves it."""
    folder, config = tmp_path_factory.mktemp("full-precision"), layouts.QWEN3
    model = publishing.randomized(config)
    model.save_pretrained(folder)
    ids = publishing.prompt(config["vocab_size"])
    with torch.no_grad():
        return publishing.Published(folder, config, ids, model(ids[None]).logits[0])


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Any]:
    """Copy a checkpoint into one file with changed tensors and ``quantization_config``."""

    def copy(
        source: Any,
        tensors: Callable[[Tensors], object] = len,
        quantization: Any = ...,
        **entries: Any,
    ) -> Any:
        stored = source.tensors
        tensors(stored)
        folder = tmp_path / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        config = json.loads((source.folder / "config.json").read_text())
        if quantization is not ...:
            config["quantization_config"] = quantization
        if entries:
            config["quantization_config"].update(entries)
        (folder / "config.json").write_text(json.dumps(config))
        return replace(source, folder=folder)

    return copy


@pytest.fixture(scope="session")
def calibrated() -> Callable[[torch.Tensor, QuantizationArgs], torch.Tensor]:
    """Return the function that computes compressed-tensors' scale of a weight."""
    return publishing.weight_scale


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Run the command line in this process, without a terminal or torchrun around it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def _few_examples() -> Iterator[None]:
    """Draw few: the laws are held with many in tests/laws, and here the layers are what is new."""
    before = settings.get_current_profile_name()
    settings.register_profile("few", settings.get_profile("ci"), max_examples=4)
    settings.load_profile("few")
    yield
    settings.load_profile(before)


@pytest.fixture
def _finite_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the scale of a block from one byte."""

    def finite(blocks: torch.Tensor, at: int) -> torch.Tensor:
        return blocks[:, at : at + 1].float() / 4096

    # Replaced: the laws draw random bytes, and two of them may be NaN as a float16.
    monkeypatch.setattr(gguf_blocks, "_half", finite)

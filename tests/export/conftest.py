"""Tiny checkpoints that transformers saved, each once, and the command line."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from vllm_module.cli import main

CONFIGS: dict[str, dict[str, Any]] = runpy.run_path(
    str(Path(__file__).parents[1] / "models/configurations.py")
)["CONFIGS"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the checkpoint of a configuration by its name, in bfloat16."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            logging.disable_progress_bar()
            folder = tmp_path_factory.mktemp(name)
            config = AutoConfig.for_model(**CONFIGS[name])
            model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            generator = torch.Generator().manual_seed(0)
            for each, parameter in model.named_parameters():
                scale = 1.0 if "norm" in each else 0.2
                parameter.data.normal_(0, scale, generator=generator)
            model.save_pretrained(folder)
            (folder / "tokenizer.json").write_text("{}")
            made[name] = folder
        return made[name]

    return get


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; return the exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return call

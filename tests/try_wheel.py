"""Install the wheel in empty environments, each extra alone, and try what each promises.

Downloads what it installs; ``make wheel`` runs it. Prints one line for each step, with its
seconds. The exit code is 1 if a step fails, after its output.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))

# Imports each of our modules; those of an extra that is not installed must name that extra.
IMPORT_ALL = """
import pkgutil, sys, vllm_module
needs = {"vllm_module.testing": "vllm-module[testing]", "vllm_module.server": "vllm-module[serve]"}
def failed(name):
    error = sys.exc_info()[1]
    assert needs.get(name, "no extra") in str(error), f"{name}: {error!r}"
names = [m.name for m in pkgutil.walk_packages(vllm_module.__path__, "vllm_module.", failed)]
for name in names:
    if not name.startswith(tuple(needs)) and not name.endswith("__main__"):
        __import__(name)
missing = [name for name in vllm_module.__all__ if not hasattr(vllm_module, name)]
assert not missing, missing
assert len(names) > 50, names
"""
# A configuration in the layout of compressed-tensors, as far as it is read.
COMPRESSED = """
from vllm_module.quantization import rules_for
rules_for(None, {"quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float",
    "strategy": "channel", "symmetric": True, "dynamic": False}}}, "ignore": ["lm_head"]})
"""
LAW = """
import torch
from vllm_module.layers import ColumnParallelLinear
from vllm_module.testing import LAWS
for law in LAWS:
    law(ColumnParallelLinear, 3, 4, gather_output=True, inputs=lambda module: (torch.ones(2, 3),))
"""
PLOT = """
from pathlib import Path
from vllm_module.cli.pictures.plots import check_plot
check_plot(Path("plot.png"))
"""
WRAPPED = """
import json
from pathlib import Path
from vllm_module import DeviceConfig, LoadConfig, ModelConfig, get_model
folder = Path("opt")
folder.mkdir()
config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "num_hidden_layers": 1,
    "hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_attention_heads": 2,
    "max_position_embeddings": 16, "vocab_size": 16}
(folder / "config.json").write_text(json.dumps(config))
get_model(model_config=ModelConfig(model=str(folder)), device_config=DeviceConfig(device="cpu"),
    load_config=LoadConfig(load_format="dummy"))
"""
NIXL = "from vllm_module.cooperative.nixl import NixlCarrier; NixlCarrier()"
CODES = """
import torch
from vllm_module.kernels.matmul.code_rows import eight_bit_rows
from vllm_module.kernels.matmul.code_rows_matmul import code_rows_matmul
weight, x = torch.ones(64, 32, dtype=torch.int8), torch.ones(1, 32)
rows = eight_bit_rows(weight, torch.full((64, 1), 0.5), (1, 32))
assert code_rows_matmul(x, rows).eq(16).all()
"""
# For each extra, code that needs it, and what that says where the extra is missing.
EXTRAS = {
    "compressed-tensors": (COMPRESSED, "vllm-module[compressed-tensors]"),
    "cpu": (CODES, "vllm-module[cpu]"),
    "demo": ("import transformers", "No module named 'transformers'"),
    "digest": ("import numba", "No module named"),
    "docs": ("import material, mkdocs, mkdocstrings_handlers.python", "No module named"),
    "fuzz": ("import atheris", "No module named"),
    "lint": ("import mypy, ruff", "No module named"),
    "nixl": (NIXL, "the extra nixl"),
    "otel": ("import opentelemetry.instrumentation.starlette", "No module named"),
    "peft": ("import peft", "No module named"),
    "plot": (PLOT, "vllm-module[plot]"),
    "ray": ("import ray", "No module named"),
    "serve": ("import vllm_module.server.app", "vllm-module[serve]"),
    "stores": ("import obstore", "No module named"),
    "structured-outputs": ("import llguidance", "No module named"),
    "survivors": ("import pytest_cov", "No module named"),
    "test": ("import build, hypothesis, pytest, transformers, xdist", "No module named"),
    "testing": (LAW, "vllm-module[testing]"),
    "transformers": (WRAPPED, "vllm-module[transformers]"),
}


class Environment:
    """A new virtual environment in ``folder``, which may see the packages of another."""

    def __init__(self, python: str, folder: Path, below: Environment | None = None) -> None:
        self.bin = folder / "bin"
        self.name = folder.name
        subprocess.run([python, "-m", "venv", folder], check=True)
        (self.packages,) = folder.glob("lib/python*/site-packages")
        if below is not None:
            (self.packages / "below.pth").write_text(str(below.packages))

    def run(self, what: str, *command: str, code: int = 0, says: str = "") -> None:
        """Run a program of the environment; ``code`` and ``says`` are what it must end with."""
        start = time.perf_counter()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.bin.parent,
            env=environment | {"PYTHONWARNINGS": "default", "COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=False,
        )
        output = done.stdout + done.stderr
        print(f"{self.name:20}{what:40}{time.perf_counter() - start:6.1f} s", flush=True)
        if done.returncode != code or says not in output or "Failed to initialize" in output:
            wanted = f"exit code {code}" + (f" and {says!r}" if says else "")
            sys.exit(f"expected {wanted}, got exit code {done.returncode}:\n{output}")

    def install(self, what: str, *requirements: str) -> None:
        """Install requirements with the versions that CI runs, and check that they agree."""
        self.run(what, "python", "-m", "pip", "install", "-q", *CONSTRAINTS, *requirements)
        self.run("pip check", "python", "-m", "pip", "check")


def build(folder: Path) -> Path:
    """Build the wheel from an sdist, so that nothing of an older build gets in."""
    command = [sys.executable, "-m", "build", "-q", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert extras == set(EXTRAS), f"each extra has its line in EXTRAS: {sorted(extras)}"
    return wheel


def main() -> None:
    """Try the core alone, then each extra in an environment of its own above the core's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="which to make environments with")
    parser.add_argument("--extras", nargs="*", default=sorted(EXTRAS), help="by default all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-module-wheel-") as temporary:
        folder = Path(temporary)
        wheel = build(folder / "dist")
        core = Environment(arguments.python, folder / "core")
        core.install("install torch", "torch")  # before what could choose another, gigabytes large
        core.install("install the wheel", str(wheel))
        core.run("import every module", "python", "-W", "error", "-c", IMPORT_ALL)
        for name, (code, missing) in EXTRAS.items():
            core.run(f"say that {name} is missing", "python", "-c", code, code=1, says=missing)
        core.run("vllm-module --version", "vllm-module", "--version", says="vllm-module ")
        core.run("vllm-module --help", "vllm-module", "--help", says="generate")
        core.run("vllm-module demo", "vllm-module", "demo", "--keep", "ckpt", says="All checks")
        prompt = ("--prompt", "A model is a tree", "--max-new-tokens", "5")
        core.run("vllm-module generate", "vllm-module", "generate", "ckpt", *prompt)
        for name in arguments.extras:
            above = Environment(arguments.python, folder / name, core)
            above.install(f"install [{name}]", f"{wheel}[{name}]")
            above.run(f"use [{name}]", "python", "-c", EXTRAS[name][0])
            if name == "demo":
                demo = ("-m", "vllm_module.cli", "demo")
                above.run("compare with transformers", "python", *demo, says="transformers 5")
    print("The wheel holds what it promises.")


if __name__ == "__main__":
    main()

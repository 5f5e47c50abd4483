"""Checkpoints that GPTQModel, AutoAWQ, AutoRound and NVIDIA ModelOpt write, and their numbers.

These libraries want packages beside which this project's do not install, so each quantizes a tiny
model in an interpreter of its own (``quantizers.py``): ``QUANTIZERS_PYTHON=/path/of/venv/bin/python
pytest tests/quantization/test_quantizers.py``. It may name several, with a ``:`` between them; a
library is taken from the first that has it, and without one its tests are skipped. In each: ``pip
install transformers`` and ``gptqmodel``, ``autoawq datasets transformers==4.51.3``, ``auto-round
compressed-tensors`` or ``nvidia-modelopt requests``. No GPU is needed; where pip finds another
torch than the one that is there, ``--no-deps`` helps.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import WeightLoadError
from vllm_module.quantization import QuantizableKVCache, QuantizableLayer, UnquantizedMethod

Tensors = dict[str, torch.Tensor]

_SCRIPT = Path(__file__).with_name("quantizers.py")
quantizers = SimpleNamespace(**runpy.run_path(str(_SCRIPT)))
PYTHONS = [each for each in os.environ.get("QUANTIZERS_PYTHON", "").split(os.pathsep) if each]
pytestmark = pytest.mark.skipif(not PYTHONS, reason="QUANTIZERS_PYTHON names no interpreter")
CASES = [(library, case) for library, cases in quantizers.CASES.items() for case in cases]
ALL = pytest.mark.parametrize(("library", "case"), CASES, ids=[case for _, case in CASES])
SLOTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("gate_proj", "up_proj"),
    "w2": ("down_proj",),
}
IDS = torch.arange(2, 26)


class Written(NamedTuple):
    """A checkpoint of a library, and what the library reads from it."""

    folder: Path
    read: Tensors

    @property
    def stored(self) -> Tensors:
        return {
            name: tensor
            for file in self.folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }


def run(
    python: str, *arguments: object, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [python, *map(str, arguments)], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=1800, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Written]:
    """Return what a library writes for a case; it runs once, for all of them."""

    @cache
    def folder_of(library: str) -> Path:
        has = f"import importlib.util as u, sys; sys.exit(u.find_spec({library!r}) is None)"
        able = [each for each in PYTHONS if run(each, "-c", has).returncode == 0]
        if not able:
            pytest.skip(f"no interpreter of QUANTIZERS_PYTHON has {library}")
        folder = tmp_path_factory.mktemp(library)
        done = run(able[0], _SCRIPT, library, folder, folder=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    def get(library: str, case: str) -> Written:
        folder = folder_of(library)
        return Written(folder / case, load_file(folder / f"{case}.safetensors"))

    return get


def loaded(folder: Path) -> Any:
    return get_model(model_config=ModelConfig(model=str(folder), dtype="float32"))


def names_of(path: str) -> list[list[str]]:
    """Return what checkpoints call the slots of a layer, or those of each expert."""
    parent, _, name = path.rpartition(".")
    slots = SLOTS.get(name, (name,))
    if name not in ("w13", "w2"):
        return [[f"{parent}.{slot}".lstrip(".") for slot in slots]]
    count = quantizers.EXPERTS["num_experts"]
    return [[f"{parent}.{expert}.{slot}" for slot in slots] for expert in range(count)]


def part_of(wide: Tensors, path: str, rank: int, size: int) -> torch.Tensor:
    """Return a rank's part of the weight of a layer."""
    dim = int(path.endswith(("o_proj", "down_proj", "w2")))  # these are cut by their inputs
    parts = [
        torch.cat([wide[f"{slot}.weight"].chunk(size, dim)[rank] for slot in slots])
        for slots in names_of(path)
    ]
    return torch.stack(parts) if path.endswith(("w13", "w2")) else parts[0]


@torch.no_grad()
def logits_of(made: Written) -> torch.Tensor:
    """Return transformers' logits in float32, with the weights that the library reads."""
    model = quantizers.model_of(made.folder.name)
    wide = made.stored | made.read
    for name, parameter in model.named_parameters():
        for stacked, path in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            if name.endswith(f".experts.{stacked}"):
                wide[name] = part_of(wide, name.removesuffix(stacked) + path, 0, 1)
        parameter.copy_(wide[name])
    return model.eval()(IDS[None]).logits[0]


@pytest.mark.parametrize("size", [1, 2])
@ALL
def test_weights_and_logits_are_the_librarys(
    written: Callable[[str, str], Written], library: str, case: str, size: int
) -> None:
    """The layers that the library has quantized, and no others, multiply by the bits it reads."""
    made = written(library, case)
    expected = logits_of(made)
    # AutoAWQ's weights are rounded to 16 bits; a relative error of 2^-11 each moves logits so far.
    within = 1e-2 if library == "awq" else 1e-4

    def work(rank: int) -> tuple[set[str], torch.Tensor]:
        model, quantized = loaded(made.folder), set[str]()
        for path, layer in model.named_modules():
            if isinstance(layer, QuantizableKVCache) and layer.k_scale is not None:
                for name in ("k_scale", "v_scale"):
                    stored = f"{path.removesuffix('.attn')}.{name}"
                    assert torch.equal(layer.get_parameter(name)[0], made.read[stored])
                    quantized.add(stored)
            if not isinstance(layer, QuantizableLayer) or isinstance(
                layer.quant_method, UnquantizedMethod
            ):
                continue
            part = part_of(made.read, path, rank, size)
            wide = layer.quant_method.full_precision(layer, torch.float32)
            torch.testing.assert_close(wide.to(part.dtype), part, rtol=0, atol=0, msg=path)
            quantized |= {f"{slot}.weight" for slots in names_of(path) for slot in slots}
        with torch.inference_mode():
            return quantized, model.compute_logits(model(IDS, torch.arange(len(IDS))))

    for quantized, computed in run_ranks(size, work):
        assert quantized == set(made.read)
        torch.testing.assert_close(computed, expected, rtol=0, atol=within)


def damages(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Tensors]]:
    """Yield what is wrong with a tensor, and what is stored in its place."""
    if not name.endswith(".g_idx") or not torch.equal(tensor, tensor.sort().values):
        yield "missing", {}  # AutoRound leaves out the groups of inputs that are in order
    yield "beside another", {name: tensor, f"{name}s": tensor.clone()}
    yield "of another type", {name: tensor.int() if tensor.is_floating_point() else tensor.float()}
    if tensor.ndim:
        yield "cut", {name: tensor[:-1].contiguous()}
    if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
        yield "transposed", {name: tensor.T.contiguous()}
    if name.endswith(".g_idx"):
        yield "of groups that are not there", {name: tensor + 1}
    if tensor.is_floating_point():
        wrong = tensor.float().clone()
        wrong.view(-1)[0] = torch.nan
        yield "NaN", {name: wrong.to(tensor.dtype)}


@pytest.mark.parametrize("size", [1, 2])
@ALL
def test_damages_are_refused_by_name(
    written: Callable[[str, str], Written], tmp_path: Path, library: str, case: str, size: int
) -> None:
    """Each tensor of a layer that is missing, misshapen or no number is named."""
    made = written(library, case)
    stored = made.stored
    layers = [name.removesuffix(".weight") for name in made.read if name.endswith(".weight")]
    layer = next(name for name in layers if name.endswith(("up_proj", "down_proj")[size - 1]))
    (tmp_path / "config.json").write_bytes((made.folder / "config.json").read_bytes())
    for name in [each for each in stored if each.startswith(f"{layer}.")]:
        kept = {each: tensor for each, tensor in stored.items() if each != name}
        for wrong, instead in damages(name, stored[name]):
            save_file(kept | instead, tmp_path / "model.safetensors")
            with pytest.raises(WeightLoadError) as refused:
                run_ranks(size, lambda rank: loaded(tmp_path))
            message, slot = str(refused.value), layer.rpartition(".")[2]
            attr = name.rpartition(".")[2]
            assert name in message or (attr in message and slot in message), (wrong, message)


# The libraries that write a file of their own, and its name.
FILES = {"gptqmodel": "quantize_config.json", "modelopt": "hf_quant_config.json"}


@pytest.mark.parametrize(
    ("library", "case"),
    [pytest.param(*each, id=each[1]) for each in CASES if each[0] in FILES],
)
def test_a_configuration_in_a_file_of_its_own_says_the_same(
    written: Callable[[str, str], Written], tmp_path: Path, library: str, case: str
) -> None:
    """Layers have the same methods where config.json has no quantization_config."""
    made = written(library, case)
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (tmp_path / FILES[library]).is_file()
    assert methods_of(loaded(tmp_path)) == methods_of(loaded(made.folder))


def methods_of(model: Any) -> dict[str, tuple[type, dict[str, Any]]]:
    return {
        path: (type(layer.quant_method), vars(layer.quant_method))
        for path, layer in model.named_modules()
        if isinstance(layer, QuantizableLayer)
    }

"""No pickle of a checkpoint runs anything, and no line of this package could let one run."""

from __future__ import annotations

import ast
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_module import get_model
from vllm_module.config import ModelConfig
from vllm_module.errors import CheckpointFormatError, WeightLoadError
from vllm_module.weights import open_checkpoint

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 8,
}


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def pickled(target: Path) -> bytes:
    return pickle.dumps({"weight": Payload(target)}, protocol=2)


def zipped(target: Path) -> bytes:
    """Pickle in the format of torch.save since 1.6."""
    stream = io.BytesIO()
    torch.save({"weight": Payload(target)}, stream)
    assert zipfile.is_zipfile(stream)
    return stream.getvalue()


def old(target: Path) -> bytes:
    """Pickle in the older format of torch.save."""
    stream = io.BytesIO()
    torch.save({"weight": Payload(target)}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def behind_a_header(target: Path) -> bytes:
    """Write a valid safetensors file whose data is a pickle."""
    data = pickled(target)
    entry = {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    header = json.dumps(entry).encode()
    return len(header).to_bytes(8, "little") + header + data


def test_the_payloads_are_live(tmp_path: Path) -> None:
    """Loading the payloads of the tests below would run their code."""
    pickle.loads(pickled(tmp_path / "by pickle"))
    for number, dump in enumerate((zipped, old)):
        stream = io.BytesIO(dump(tmp_path / f"by torch {number}"))
        torch.load(stream, weights_only=False)
    assert len([*tmp_path.iterdir()]) == 3


@pytest.mark.parametrize("dump", [pickled, zipped, old])
@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "model.pt",
        "consolidated.00.pth",
        "model.ckpt",
        "model.safetensors",
        "other.safetensors",
        "consolidated.safetensors",
        INDEX,
        "config.json",
    ],
)
def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path, name: str, dump) -> None:
    folder, target = tmp_path / "folder", tmp_path / "it ran"
    folder.mkdir()
    if name != "config.json":
        (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / name).write_bytes(dump(target))
    with pytest.raises(WeightLoadError):
        get_model(model_config=ModelConfig(model=str(folder)))
    with pytest.raises(CheckpointFormatError):
        open_checkpoint(folder)
    with pytest.raises(CheckpointFormatError):
        open_checkpoint(folder / name)
    assert not target.exists()


def test_an_index_of_pickles_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "it ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickled(target))
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"weight": "pytorch_model.bin"}})
    )
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model\.bin: it is no zip archive"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").rename(tmp_path / INDEX)
    with pytest.raises(CheckpointFormatError, match=r"should be in a \.safetensors file"):
        open_checkpoint(tmp_path)
    assert not target.exists()


def test_a_pickle_among_the_data_is_bytes(tmp_path: Path) -> None:
    target = tmp_path / "it ran"
    (tmp_path / "model.safetensors").write_bytes(behind_a_header(target))
    assert bytes(open_checkpoint(tmp_path)["w"].read().tolist()) == pickled(target)
    assert not target.exists()


UNSAFE_MODULES = frozenset(
    ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
)
UNSAFE_CALLS = {"eval", "exec", "__import__"}
UNSAFE_LOADS = {"np.load", "numpy.load", "np.fromfile", "torch.jit.load", "torch.package"}
# These pickle messages between ranks of one job, which run the same program; no file is read.
ELSEWHERE = {
    # Statuses of the ranks of one engine, as torch.distributed.all_gather_object sends them.
    ("vllm_module/base/process_groups.py", "pickle"),
    ("vllm_module/distributed/exchange.py", "pickle"),
    ("vllm_module/build/model_source.py", "pickle"),
    ("vllm_module/runtime/ranks/extension.py", "pickle"),
    ("vllm_module/runtime/ranks/group.py", "pickle"),
    ("vllm_module/runtime/ranks/worker.py", "pickle"),
}


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each call that can run code from the bytes of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
            yield from ((node.lineno, name) for name in names if name in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.partition(".")[0] in UNSAFE_MODULES:
                yield node.lineno, module
            imported = [f"{module}.{alias.name}" for alias in node.names]
            yield from (
                (node.lineno, name)
                for name in imported
                if name in UNSAFE_LOADS | {"torch.load", "torch.serialization.load"}
            )
        elif isinstance(node, ast.Name) and node.id in UNSAFE_CALLS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_LOADS:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = any(
                keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
                for keyword in node.keywords
            )
            if called.endswith(("torch.load", "serialization.load")) and not safe:
                yield node.lineno, called


def test_no_line_of_the_package_loads_code_from_bytes() -> None:
    files = [
        path
        for folder in ("vllm_module", "models", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(files) > 30
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in unsafe(ast.parse(path.read_bytes()))
        if (str(path.relative_to(ROOT)), name) not in ELSEWHERE
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, marshal as m",
        "from shelve import open",
        "import dill.source",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "from torch import load",
        "torch.serialization.load(path)",
        "np.load(path)",
        "eval(text)",
        "run = exec",
        "__import__(name)",
        "torch.jit.load(path)",
    ],
)
def test_a_line_that_does_is_found(line: str) -> None:
    assert len(list(unsafe(ast.parse(line)))) >= 1


@pytest.mark.parametrize(
    "line",
    ["torch.load(path, weights_only=True)", "model.eval()", "cursor.exec()", "json.loads(text)"],
)
def test_a_line_that_does_not_is_not(line: str) -> None:
    assert list(unsafe(ast.parse(line))) == []

"""Folders of torch.distributed.checkpoint: torch's own reader decides what they hold."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
)

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import build_model, read_config
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

# Pytest's importlib mode has no imports between test files.
FOLDERS = runpy.run_path(str(Path(__file__).with_name("dcp_folders.py")))
STATE, write = FOLDERS["STATE"], FOLDERS["write"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write(folder)
    return folder


def test_tensors_are_those_that_torch_reads(folder: Path) -> None:
    """Whole tensors and every slice have the bits that torch's own reader gives."""
    asked = {f"model.{name}": torch.empty_like(tensor) for name, (tensor, _) in STATE.items()}
    dcp.load(asked, checkpoint_id=folder, no_dist=True)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.load_format == "dcp"
        assert checkpoint.keys() == STATE.keys()
        for name, handle in checkpoint.items():
            tensor = asked[f"model.{name}"]
            assert torch.equal(tensor, STATE[name][0])
            assert handle.dtype == tensor.dtype
            assert torch.equal(handle.read(), tensor)
            for dim, size in enumerate(tensor.shape):
                for start, end in product(range(size + 1), repeat=2):
                    if start <= end:
                        part = handle.narrow(dim, start, end - start)
                        assert torch.equal(part.read(), tensor.narrow(dim, start, end - start))
                        wide = torch.empty(part.shape, dtype=torch.float64)
                        if tensor.is_floating_point():
                            part.read_into(wide)
                            assert torch.equal(wide, part.read().double())


def test_what_torch_saves_itself_is_read(tmp_path: Path) -> None:
    """A dict with a model, an optimizer and a counter gives the model's tensors."""
    model = {"embed.weight": torch.randn(3, 2), "head": torch.randn(2, 5).t().contiguous()}
    saved = {"model": model, "optim": {"state": {"embed.weight": torch.ones(3)}}, "step": 3}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"epoch": 1}, tmp_path / "meta.pt")  # as Lightning does, which calls DCP
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.keys() == model.keys()
        assert all(torch.equal(checkpoint[name].read(), model[name]) for name in model)
    flat = tmp_path / "flat"
    dcp.save(model, checkpoint_id=flat, no_dist=True)
    with open_checkpoint(flat, "dcp") as checkpoint:
        assert checkpoint.keys() == model.keys()


@pytest.mark.parametrize("above", [("model",), ("app",), ("app", "model"), ("app", "policy")])
@pytest.mark.parametrize(
    "others",
    [
        {"optim": {"state": {"embed.weight": {"exp_avg": torch.ones(3)}}}},
        {"optimizer": {"step": torch.ones(2)}, "scheduler": {"last": {"lr": torch.ones(1)}}},
        {"train_state": {"loss": {"sum": torch.ones(())}}, "rng": {"cpu": torch.ones(4)}},
        {"ema": {"shadow": {"embed.weight": torch.zeros(3, 2)}}},
        *(
            {name: {"embed.weight": torch.zeros(3, 2)}}  # each alone, as trainers call it
            for name in ("Optimizer_0", "LR_SCHEDULERS", "grad_scaler", "rng_state", "dataloader")
        ),
        *(
            {name: {"embed.weight": torch.zeros(3, 2)}}
            for name in ("optim_states", "GradScaler", "emas", "sched", "scaler", "optimisers")
        ),
        {"rng_state": [torch.ones(4), torch.ones(4)]},  # lists, whose keys are numbers
        {"optim": {"state": [{"exp_avg": torch.ones(3)}], "lrs": [torch.ones(())]}},
        *({name: {"embed.weight": torch.zeros(3, 2)}} for name in ("train_state", "model_EMA")),
    ],
)
def test_the_weights_are_found_beside_what_a_trainer_saves(
    tmp_path: Path, above: tuple[str, ...], others: dict[str, Any]
) -> None:
    """Whatever their dict is called, and however deep the others lie, the model's are given."""
    model = {"embed.weight": torch.randn(3, 2), "head": torch.randn(2, 5)}
    saved: dict[str, Any] = model
    for name in reversed(above):
        saved = {name: saved}
    dcp.save({**saved, **others}, checkpoint_id=tmp_path, no_dist=True)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.keys() == model.keys()
        assert all(torch.equal(checkpoint[name].read(), model[name]) for name in model)


@pytest.mark.parametrize(
    ("saved", "chosen"),
    [
        ({"model": {"w": 1}, "critic": {"w": 2}}, 1),  # the dict that is called so
        ({"app": {"critic": {"w": 2}, "model": {"w": 1}}}, 1),
        ({"model": {"w": 1}, "models": {"w": 2}}, 1),
        ({"model": {"encoder": {"w": 1}}}, 1),
        ({"policy": {"w": 1}, "critic": {"w": 2}}, None),
        ({"model": {"encoder": {"w": 1}, "decoder": {"v": 2}}}, None),
        ({"a": {"model": {"w": 1}}, "b": {"model": {"w": 2}}}, None),
        ({"optim": {"w": 1}}, None),
        ({"app": {"ema": {"optimal_w": 1}}}, None),
        # Words, of which a part may be that of another.
        ({"app": {"schema": {"w": 1}}}, 1),
        *(({name: {"model": {"w": 1}}}, 1) for name in ("semantic", "optimal", "stringy")),
        ({"upscaler": {"w": 1}}, 1),
        ({"model": {"w": 1}, "history": [2, 3]}, 1),
        ({"app": {"optimizer_w": 1, "ema": 2}}, 1),  # these words count above a tensor only
    ],
)
def test_of_two_dicts_that_called_model_is_taken(
    tmp_path: Path, saved: dict[str, Any], chosen: int | None
) -> None:
    """Without one, or with two, which holds the weights is not guessed."""

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tensors(each) for name, each in value.items()}
        if isinstance(value, list):
            return [tensors(each) for each in value]
        return torch.full((2,), float(value))

    dcp.save(tensors(saved), checkpoint_id=tmp_path, no_dist=True)
    if chosen is None:
        with pytest.raises(CheckpointFormatError, match=r"expected the weights in one dict"):
            open_checkpoint(tmp_path)
        return
    with open_checkpoint(tmp_path) as checkpoint:
        assert next(iter(checkpoint.values())).read().tolist() == [chosen, chosen]


def test_a_slice_reads_its_bytes_alone(tmp_path: Path) -> None:
    """Rows of one chunk are all that is read for them."""
    tensor = torch.randn(64, 256)
    write(tmp_path, {"w": (tensor, ((10, 32), ()))})
    with open_checkpoint(tmp_path) as checkpoint:
        handle = checkpoint["w"].narrow(0, 12, 5)
        assert checkpoint.bytes_read == 0
        assert torch.equal(handle.read(), tensor[12:17])
        assert checkpoint.bytes_read == 5 * 256 * 4


def test_what_says_less_of_a_place_is_taken(tmp_path: Path) -> None:
    """A tensor in one chunk may be stored without an offset; empty chunks need no place."""
    metadata = write(tmp_path, {"w": (torch.arange(6.0).view(2, 3), ((), ()))})
    ((_, place),) = metadata.storage_data.items()
    metadata.storage_data = {MetadataIndex("model.w"): place, MetadataIndex("model.v"): None}
    metadata.state_dict_metadata["model.w"].chunks.append(  # type: ignore[union-attr]
        ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((0, 3)))
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["w"].read(), torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (Path("x"), b"cpathlib\nPosixPath\n"),
        (PurePosixPath("x"), b"cpathlib\nPurePosixPath\n"),
        (Path("x"), b"cpathlib._local\nPosixPath\n"),  # as Python 3.13 writes it
    ],
)
def test_the_folder_that_a_trainer_wrote_to_is_read_over(
    tmp_path: Path, path: Any, named: bytes
) -> None:
    """torch keeps it in the metadata, as a path of the Python that wrote it."""
    metadata = write(tmp_path, {"w": (torch.ones(2), ((),))})
    metadata.storage_meta = StorageMeta(checkpoint_id=path)
    data = pickle.dumps(metadata, protocol=2)
    assert re.search(rb"cpathlib\S*\n\w+Path\n", data)
    data = re.sub(rb"cpathlib\S*\n\w+Path\n", named, data)
    (tmp_path / ".metadata").write_bytes(data)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint["w"].read().tolist() == [1, 1]


def test_closing_gives_every_file_back(tmp_path: Path) -> None:
    """Also where opening is refused after some files were opened."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    metadata = write(tmp_path)
    before = opened()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint["model.mesh.weight"].read().shape == (6, 8)
    assert opened() > before
    checkpoint.close()
    assert opened() == before
    *_, last = metadata.storage_data.values()
    last.relative_path = "none"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match="none, which is not there"):
        open_checkpoint(tmp_path)
    assert opened() == before


@pytest.mark.parametrize(("dims", "taken"), [(4, True), (5, False)])
def test_a_tensor_is_cut_in_at_most_four_dimensions(tmp_path: Path, dims: int, taken: bool) -> None:
    tensor = torch.arange(2.0**dims * 3).view(*[2] * dims, 3)  # and is whole in the last
    write(tmp_path, {"w": (tensor, (*[(1,)] * dims, ()))})
    if taken:
        with open_checkpoint(tmp_path) as checkpoint:
            assert torch.equal(checkpoint["w"].read(), tensor)
        return
    with pytest.raises(CheckpointFormatError, match="should cover each of"):
        open_checkpoint(tmp_path)


def test_damage_inside_a_chunk_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """A chunk that is no archive, or of another shape, names its file, tensor and place."""
    metadata = write(tmp_path, {"w": (torch.randn(8, 4), ((4,), ()))})
    file = tmp_path / "__1_0.distcp"
    good = file.read_bytes()
    file.write_bytes(b"\0" * len(good))
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(WeightReadError, match=r"__1_0.distcp: the chunk of 'w' at \[4, 0\]"):
            checkpoint["w"].read()
        assert checkpoint["w"].narrow(0, 0, 4).read().shape == (4, 4)
    file.write_bytes(good)
    first, second = metadata.storage_data.values()
    first.relative_path, first.length = "__1_0.distcp", second.length
    metadata.state_dict_metadata["model.w"].chunks = [  # type: ignore[union-attr]
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 8))),
    ]
    metadata.state_dict_metadata["model.w"].size = torch.Size((2, 8))  # type: ignore[union-attr]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(WeightReadError, match=r"shape \[4, 4\], and .metadata says .*\[2, 8\]"),
    ):
        checkpoint["w"].read()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_loads_what_its_trainer_saved(tmp_path: Path, size: int) -> None:
    """Each rank of a Llama holds the cut of the tensors, whatever the trainer's own cut was."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_config = ModelConfig(model=str(tmp_path))
    meta = build_model(
        read_config(tmp_path, model_config), torch.float32, torch.device("cpu")
    ).expected_weights()
    torch.manual_seed(0)
    tensors = {name: torch.randn(tuple(each.shape)) for name, each in meta.items()}
    cut = {
        name: (each, ((each.shape[0] // 3,), *[()] * (each.dim() - 1)))
        for name, each in tensors.items()
    }
    write(tmp_path, cut, ("app", "model"))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file(tensors, plain / "model.safetensors")
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size):
            ours = get_model(model_config=model_config)
            expected = get_model(model_config=ModelConfig(model=str(plain)))
        for (name, one), (_, other) in zip(
            ours.named_parameters(), expected.named_parameters(), strict=True
        ):
            assert torch.equal(one, other), name

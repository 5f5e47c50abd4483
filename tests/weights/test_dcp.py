"""Folders of torch.distributed.checkpoint: torch's own reader decides what they hold."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import build_model, read_config
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.pickled.dcp_metadata import StoredChunk
from vllm_module.weights.pickled.dcp_metadata import _cover as covers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

# By name, a tensor and where its dimensions are cut: as FSDP cuts 5 rows on 2 ranks, a mesh of two
# dimensions, and a tensor that is whole.
STATE: dict[str, tuple[torch.Tensor, tuple[tuple[int, ...], ...]]] = {
    "model.rows.weight": (torch.arange(20.0).view(5, 4), ((3,), ())),
    "model.mesh.weight": (torch.randn(6, 8).bfloat16(), ((2, 4), (3,))),
    "model.whole": (torch.arange(7), ((),)),
    "model.number": (torch.tensor(2.5), ()),
    "model.columns": (torch.randn(4, 6).half().t(), ((), (1,))),
}


def write(folder: Path, state: Any = None, above: tuple[str, ...] = ("model",)) -> Metadata:
    """Write a folder as ranks of a trainer do, a file for each of two."""
    state = STATE if state is None else state
    files = [io.BytesIO(), io.BytesIO()]
    described, stored, paths = {}, {}, {}
    for name, (tensor, cuts) in state.items():
        key = ".".join((*above, name))
        paths[key] = (*above, name)
        chunks = []
        edges = [(0, *cut, size) for cut, size in zip(cuts, tensor.shape, strict=True)]
        for index, span in enumerate(product(*[list(pairwise(e)) for e in edges])):
            offsets = torch.Size(begin for begin, _ in span)
            part = tensor
            for dim, (begin, end) in enumerate(span):
                part = part.narrow(dim, begin, end - begin)
            chunks.append(ChunkStorageMetadata(offsets, part.shape))
            saved = io.BytesIO()
            # As torch's writer, which copies what is a part of a storage.
            torch.save(part.clone() if part.untyped_storage().nbytes() else part, saved)
            file = index % 2
            place = _StorageInfo(f"__{file}_0.distcp", files[file].tell(), len(saved.getvalue()))
            stored[MetadataIndex(key, offsets, index)] = place
            files[file].write(saved.getvalue())
        properties = TensorProperties.create_from_tensor(tensor)
        described[key] = TensorStorageMetadata(properties, tensor.shape, chunks)
    metadata = Metadata(described, paths, stored)  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for index, data in enumerate(files):
        (folder / f"__{index}_0.distcp").write_bytes(data.getvalue())
    return metadata


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
        ({"app": {"schema": {"optimal_w": 1}}}, None),
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


def drop_chunk(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["model.model.rows.weight"].chunks[0]  # type: ignore[union-attr]


def repeat_chunk(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["model.model.mesh.weight"].chunks  # type: ignore[union-attr]
    chunks[1] = ChunkStorageMetadata(chunks[0].offsets, chunks[1].sizes)


def move(metadata: Metadata, **change: Any) -> None:
    for place in metadata.storage_data.values():
        vars(place).update(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_chunk, "hold 8 elements and should cover each of 20 once"),
        (repeat_chunk, "should cover each of 48 once"),
        (lambda m: move(m, relative_path="../secret"), "should be in a file of the same folder"),
        (lambda m: move(m, relative_path="__9_0.distcp"), "__9_0.distcp, which is not there"),
        (lambda m: move(m, length=10**9), "should end at byte"),
        (lambda m: move(m, offset=-1), "is in no file"),
        (lambda m: move(m, transform_descriptors=["zstd"]), "compressed or encrypted"),
        (lambda m: m.state_dict_metadata.clear(), "found tensors in none"),
        (lambda m: m.planner_data.update({"network.model.whole": ("other", "w")}), "in one dict"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Metadata], Any], message: str
) -> None:
    """Chunks that leave an element out, or share one, and files that are not there: by name."""
    metadata = write(tmp_path, above=("network",) if "one dict" in message else ("model",))
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        open_checkpoint(tmp_path)
    assert ".metadata" in str(refused.value)


KEY = "model.model.rows.weight"  # of two chunks, (3, 4) and (2, 4) at (3, 0)
NO_SIZE = (None, "x", -1, True, 1.0, 1 << 63)
FIELDS: dict[str, tuple[Any, ...]] = {
    "relative_path": (None, 3, b"x", "", ".", "..", "a/b", "/x"),
    "offset": (*NO_SIZE, 1 << 62),
    "length": (*NO_SIZE, 1 << 62),
    "properties": (None, {}, "float32", TensorProperties(torch.qint8)),
    "size": (None, (5,), (5, 4, 1), (5, None), (5, -4), (5, True), [5, 4], (5, 5), (5, 3), 20),
    "offsets": (None, (0,), (0, 0, 0), (0, None), (0, -1), (0, True), [0, 0], (0, 1), 0),
    "sizes": (None, (3,), (3, 4, 1), (3, None), (3, -4), (3, True), [3, 4], (2, 4), (4, 4), 12),
    "chunks": (None, "x", [], [None], [3]),
    "state_dict_metadata": (None, [], "x", {}),
    "storage_data": (None, [], "x", {}),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in FIELDS for value in FIELDS[field]]
)
def test_a_field_with_a_wrong_value_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    """No value of the wrong type, sign or size, nor the nearest of the right one, gets further."""
    metadata = write(tmp_path, {"model.rows.weight": STATE["model.rows.weight"]})
    described: Any = metadata.state_dict_metadata[KEY]
    stored = next(iter(metadata.storage_data.values()))
    holders: tuple[Any, ...] = (metadata, described, described.chunks[0], stored)
    (holder,) = (each for each in holders if hasattr(each, field))
    object.__setattr__(holder, field, value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=r"\.metadata: "):
        open_checkpoint(tmp_path)


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


@pytest.mark.parametrize(("name", "taken"), [("w" * 1024, True), ("w" * 1025, False), (3, False)])
def test_names_are_strings_of_a_bounded_length(tmp_path: Path, name: Any, taken: bool) -> None:
    metadata = write(tmp_path, {"w": (torch.ones(2), ((),))})
    metadata.planner_data["model.w"] = ("model", name)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if taken:
        with open_checkpoint(tmp_path) as checkpoint:
            assert list(checkpoint) == [name]
        return
    with pytest.raises(CheckpointFormatError, match="string of at most 1024 characters"):
        open_checkpoint(tmp_path)


def test_nothing_in_the_pickle_runs(tmp_path: Path) -> None:
    """A pickle that would run a command is refused, and the command is not run."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    write(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        CheckpointFormatError,
        match=r"asks for '(posix|nt)\.system', which is not",
    ):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


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


def test_chunks_cover_each_element_once_or_are_refused() -> None:
    """Boxes of random sizes, some of which are moved or repeated, are counted one by one."""
    drawn, covered = random.Random(0), 0
    for _ in range(700):
        shape = tuple(drawn.randint(1, 4) for _ in range(drawn.randint(0, 3)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(drawn.randint(0, 4) if shape else 0):
            begins, sizes = boxes.pop(drawn.randrange(len(boxes)))
            dim = drawn.randrange(len(shape))
            cut = drawn.randint(0, sizes[dim])
            for begin, size in ((0, cut), (cut, sizes[dim] - cut)):
                moved, cut_to = [*begins], [*sizes]
                moved[dim] += begin
                cut_to[dim] = size
                boxes.append((tuple(moved), tuple(cut_to)))
        if drawn.random() < 0.5:
            _, sizes = boxes.pop()
            places = [drawn.randint(0, n - m) for n, m in zip(shape, sizes, strict=True)]
            boxes.append((tuple(places), sizes))
        held = torch.zeros(shape, dtype=torch.int64)
        for begins, sizes in boxes:
            held[tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))] += 1
        once = bool((held == 1).all())
        assert covers([StoredChunk(*box, "file", 0, 0) for box in boxes], shape) == once
        covered += once
    assert 300 < covered < 690


def test_many_columns_are_compared_in_linear_time() -> None:
    """Chunks that all begin in the first row are not compared with each other."""
    columns = [StoredChunk((0, at), (5, 1), "file", 0, 0) for at in range(20_000)]
    begin = time.thread_time()
    assert covers(columns, (5, 20_000))
    assert not covers([*columns[:-1], columns[7]], (5, 20_000))
    assert time.thread_time() - begin < 5


def share_chunks(metadata: Metadata) -> None:
    """Let many tensors have one list of chunks, as a small pickle may."""
    one = metadata.state_dict_metadata["model.model.rows.weight"]
    for number in range(100):
        metadata.state_dict_metadata[f"model.other{number}"] = one
        metadata.planner_data[f"model.other{number}"] = "model", f"other{number}"


def nest_path(metadata: Metadata) -> None:
    path: tuple[Any, ...] = ("model", "w")
    for _ in range(60):
        path = (path, path)
    metadata.planner_data["model.model.whole"] = (path, "w")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (share_chunks, r"its tensors have \d+ chunks, and \d+ are stored"),
        (nest_path, "keys that lead to 'model.model.whole' are no names"),
        (
            lambda m: move(m, relative_path="x" * 300),
            "xx..., which is not there",
        ),
        (lambda m: move(m, relative_path="a\0b"), "which is not there"),
    ],
)
def test_metadata_that_would_take_long_is_refused(
    tmp_path: Path, change: Callable[[Metadata], Any], message: str
) -> None:
    """It ends at once, by name."""
    metadata = write(tmp_path)
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(tmp_path)


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


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02}r" + (60_000_000).to_bytes(4, "little") + b".",  # a place far away
        b"\x80\x02}q\x00"
        + b"".join(b"\x85q%ch%ch%c\x86" % (i, i, i) for i in range(1, 60))
        + b"N0.",
        b"\x80\x02}(K\x01K\x02\x86K\x03u.",  # a tuple as a key
        b"\x80\x04\x8f(K\x01\x90.",  # a set
        b"\x80\x02ctorch\nSize\nX\x05\x00\x00\x00aaaaa\x85R.",
    ],
    ids=["memo", "doubled", "tuple", "set", "size"],
)
def test_a_pickle_that_would_exhaust_memory_or_time_is_refused(tmp_path: Path, data: bytes) -> None:
    """It ends at once, by name."""
    write(tmp_path)
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=r"\.metadata: "):
        open_checkpoint(tmp_path)

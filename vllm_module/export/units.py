"""Checkpoints that are written again: one tensor or layer after another, and the files of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from vllm_module.base.messages import printable
from vllm_module.build.model_source import ModelSource
from vllm_module.config import ModelConfig
from vllm_module.core.plan import LoadPlan
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import UnsupportedModelError
from vllm_module.export.folder import write_json
from vllm_module.hf_config import quantization_file, read_entries
from vllm_module.quantization import said_in
from vllm_module.weights import Weight
from vllm_module.weights.digests import DIGESTS, digests_file
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.safetensors_writer import SafetensorsWriter, Stored
from vllm_module.weights.sharded_state import ShardedState

FILE_BYTES = 5_000_000_000  # bytes of a file, at most, unless one layer has more
# Entries of config.json about the way in which llama.cpp and Mistral store tensors.
_ELSEWHERE = {
    "stored_rotary_pairs": "the rows of queries and keys in the order of llama.cpp and Mistral",
    "stored_experts_apart": "gate and up of experts apart, as llama.cpp does",
    "stored_kv_b_apart": "keys and values of latents apart, as llama.cpp does",
}


@contextmanager
def opened(source: ModelSource, verb: str) -> Iterator[OpenWeights]:
    """Open a checkpoint in full precision and Hugging Face's layout, for a model on one rank.

    Raises ``UnsupportedModelError`` for one that is quantized, in another layout, or a sharded
    state; ``verb`` is what is done with it.
    """
    stored = getattr(source.config, "quantization_config", None)
    if stored is not None:
        beside = quantization_file(source.folder, {})
        where = said_in(stored) if beside is None else printable(beside)
        raise UnsupportedModelError(
            f"{printable(source.folder)} is quantized already ({where}): {verb} the checkpoint in "
            "full precision"
        )
    for entry, what in _ELSEWHERE.items():
        if getattr(source.config, entry, False):
            raise UnsupportedModelError(
                f"{printable(source.folder)} stores {what} ({entry}), which the layout to write "
                f"does not have: {verb} the model in Hugging Face's format"
            )
    with tensor_parallel(rank=0, size=1), source.open() as checkpoint:
        if isinstance(checkpoint, ShardedState):
            raise UnsupportedModelError(
                f"{printable(source.folder)} is a sharded state: {verb} the original checkpoint"
            )
        yield checkpoint


def entries_to_write(source: ModelSource, config: ModelConfig) -> dict[str, Any]:
    """Return the entries of the new ``config.json``: those that the source has, and a dtype.

    Where config.json has none, a load takes that of the first tensor it can run in. In the new
    files another one may be first, such as a scale.
    """
    entries = read_entries(source.folder, config.hf_overrides)
    if not (source.config.dtype or source.config.torch_dtype):
        entries["dtype"] = str(source.dtype).removeprefix("torch.")
    return entries


class WrittenUnit(Protocol):
    """Tensors that are written together."""

    @property
    def tensors(self) -> dict[str, Stored]:
        """Dtype and shape of the tensors, by name."""

    def write(self, file: SafetensorsWriter) -> None:
        """Read or compute the tensors, and write them."""


class CopiedTensor(NamedTuple):
    """A tensor that is written as it is stored."""

    name: str
    weight: Weight

    @property
    def tensors(self) -> dict[str, Stored]:
        """Dtype and shape of the tensor, by name."""
        return {self.name: Stored(self.weight.dtype, tuple(self.weight.shape))}

    def write(self, file: SafetensorsWriter) -> None:
        """Read the tensor, and write it."""
        weight = self.weight
        file.write(self.name, weight if isinstance(weight, torch.Tensor) else weight.read())


def skipped_names(plan: LoadPlan, stored: Mapping[str, Weight]) -> list[str]:
    """Return the tensors that the model skips and another library may read, such as a pooler."""
    return [name for name in stored if name in plan.report.skipped]


def write_units(
    folder: Path,
    units: Sequence[WrittenUnit],
    file_bytes: int,
    on_tensors: Callable[[int], object],
) -> int:
    """Write all units, their digests and, if there are several files, the index; return bytes."""
    files: list[list[WrittenUnit]] = [[]]
    nbytes = total = 0
    for unit in units:
        size = sum(stored.nbytes for stored in unit.tensors.values())
        if files[-1] and nbytes + size > file_bytes:
            files.append([])
            nbytes = 0
        files[-1].append(unit)
        nbytes, total = nbytes + size, total + size
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    done = 0
    for number, kept in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        name = name if len(files) > 1 else "model.safetensors"
        tensors: dict[str, Stored] = {}
        for unit in kept:
            tensors |= unit.tensors
        weight_map |= dict.fromkeys(tensors, name)
        with SafetensorsWriter(folder / name, tensors, aligned=True, digests=digests) as file:
            for unit in kept:
                unit.write(file)
                done += sum(stored.nbytes for stored in unit.tensors.values())
                on_tensors(done)
    write_json(folder / DIGESTS, digests_file([digests]))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    return total

"""Writing the tensors that each rank holds after loading, for ``load_format="sharded_state"``."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from vllm_module.base.messages import printable
from vllm_module.base.version import __version__
from vllm_module.build.held import held_tensors, load_from
from vllm_module.build.model_source import ModelSource
from vllm_module.config import ModelConfig
from vllm_module.core.digests import digest_of
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import UnsupportedModelError
from vllm_module.export.folder import copy_small_files, new_folder, write_json
from vllm_module.hf_config import read_entries
from vllm_module.weights.digests import DIGESTS, digests_file
from vllm_module.weights.safetensors import SafetensorsFile
from vllm_module.weights.safetensors_writer import SafetensorsWriter, Stored
from vllm_module.weights.sharded_state import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    ShardFile,
    cutting_entries,
    quantization_settings,
    shard_name,
)

PART_BYTES = 4 << 30  # bytes of a file, at most, unless one tensor is larger
_CPU = torch.device("cpu")


def shard(
    config: ModelConfig,
    tensor_parallel_size: int,
    out: str | Path,
    *,
    load_format: str = "auto",
    part_bytes: int = PART_BYTES,
    on_rank: Callable[[int, int], object] = lambda rank, nbytes: None,
) -> Manifest:
    """Load each rank of a model in turn, and write its tensors to the folder ``out``.

    The tensors are its parameters and persistent buffers: cut, fused, quantized and padded. A tied
    one is written once. ``digests.json`` has their digests. Host memory holds one rank. ``on_rank``
    is called after each rank, with the bytes of its tensors.

    Raises:
        ValueError: ``out`` exists and is no empty folder.
        UnsupportedModelError: the checkpoint is a sharded state; a layer changes its weights when
            it processes them, and a load of the sharded state would change them again; or
            safetensors files lack a dtype.
        WeightLoadError: the checkpoint is refused.

    """
    source = ModelSource.find(config, load_format)
    if getattr(source.source, "load_format", None) == "sharded_state":
        raise UnsupportedModelError(
            f"{printable(source.folder)} is a sharded state already: shard the original checkpoint"
        )
    if source.redundant_experts:
        raise UnsupportedModelError(
            "a sharded state has each expert once: leave num_redundant_experts out"
        )
    quantized = getattr(source.config, "quantization_config", None) is not None
    asked = quantization_settings(config.quantization)
    with new_folder(Path(os.path.expanduser(out))) as folder:
        copy_small_files(source.folder, folder)
        write_json(folder / "config.json", read_entries(source.folder, config.hf_overrides))
        ranks, digests = [], []
        for rank in range(tensor_parallel_size):
            with tensor_parallel(rank=rank, size=tensor_parallel_size):
                files, held, nbytes = _write_rank(source, rank, folder, part_bytes)
            ranks.append(files)
            digests.append(held)
            on_rank(rank, nbytes)
        write_json(folder / DIGESTS, digests_file(digests))
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            library_version=__version__,
            architectures=list(source.config.architectures),
            tensor_parallel_size=tensor_parallel_size,
            enable_expert_parallel=source.spread_experts,
            dtype=str(source.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            config=cutting_entries(source.config),
            quantization="config.json" if quantized else asked,
            ranks=ranks,
        )
        write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def _write_rank(
    source: ModelSource, rank: int, folder: Path, part_bytes: int
) -> tuple[list[ShardFile], dict[str, str], int]:
    """Load this rank's model and write it; return its files, and digests and bytes of tensors."""
    with source.open() as checkpoint:
        model = source.build(_CPU, len(checkpoint))
        load_from(model, checkpoint)
    _demand_same_when_processed_again(model)
    held = held_tensors(model)
    files = []
    for number, part in enumerate(_parts(held, part_bytes)):
        path = folder / shard_name(rank, number)
        stored = {name: Stored(each.dtype, tuple(each.shape)) for name, each in part.items()}
        # In the order of the tree, which is the order of reading.
        with SafetensorsWriter(path, stored, aligned=False) as file:
            for name, tensor in part.items():
                file.write(name, tensor)
        with closing(SafetensorsFile(path, folder)) as written:
            fingerprint = written.fingerprint().hex()
        files.append(ShardFile(size=path.stat().st_size, fingerprint=fingerprint))
    return files, model.digest().parts, sum(each.nbytes for each in held.values())


def _parts(held: dict[str, torch.Tensor], part_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Divide tensors into at least one file, each of at most ``part_bytes`` or of one tensor."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    nbytes = 0
    for path, tensor in held.items():
        if nbytes + tensor.nbytes > part_bytes and parts[-1]:
            parts.append({})
            nbytes = 0
        parts[-1][path] = tensor
        nbytes += tensor.nbytes
    return parts


def _demand_same_when_processed_again(model: vLLMModule) -> None:
    """Raise ``UnsupportedModelError`` if processing a second time changes tensors.

    A load of a sharded state processes each module, as every load does. Each module with its own
    ``process_weights_after_loading`` is processed again here.
    """
    own = vLLMModule.process_weights_after_loading
    for path, module in model.named_modules():
        if not isinstance(module, vLLMModule):
            continue
        if type(module).process_weights_after_loading is own:
            continue
        before = digest_of(module).parts
        with torch.no_grad():
            for step in module.processing():
                step()
        after = digest_of(module).parts
        if changed := [name for name, digest in after.items() if digest != before.get(name)]:
            tensor = f"{path}.{changed[0]}" if path else changed[0]
            raise UnsupportedModelError(
                f"{tensor} changes each time {type(module).__name__} processes its weights, so "
                "what is held cannot be loaded again: let process_weights_after_loading compute "
                "into a buffer that is not persistent"
            )

"""The files of an adapter, in the layout of PEFT: settings, and tensors under the base's names."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

from vllm_module.adapters.config import CONFIG_FILE, AdapterConfig, read_adapter_config
from vllm_module.base.messages import printable, printable_name, shorten
from vllm_module.core.report import fold
from vllm_module.errors import CheckpointFormatError, DuplicateWeightError, WeightReadError
from vllm_module.weights import Weight
from vllm_module.weights.checkpoint import open_checkpoint
from vllm_module.weights.regular_file import is_there

_log = logging.getLogger(__name__)
_FILES = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."  # of PEFT's own modules around the base model
_INNER = ".base_layer"
_SHORT = {  # behind "lora_"
    "A.weight": "lora_A",
    "B.weight": "lora_B",
    "embedding_A": "lora_A",
    "embedding_B": "lora_B",
}


@contextmanager
def open_adapter(path: str | Path) -> Iterator[tuple[AdapterConfig, dict[str, Weight]]]:
    """Open a folder of PEFT; yield its settings and its tensors, under the base model's names.

    Raises ``CheckpointFormatError`` for a folder that lacks a file, and for damaged ones.
    """
    folder = Path(os.path.expanduser(path))
    config = read_adapter_config(folder)
    with open_checkpoint(_tensor_file(folder)) as checkpoint:
        yield config, base_names(checkpoint, config)


def _tensor_file(folder: Path) -> Path:
    file = next((folder / name for name in _FILES if is_there(folder / name)), None)
    if file is None:
        raise CheckpointFormatError(
            f"{printable(folder)} has no {' or '.join(_FILES)}: expected a folder that PEFT's "
            "save_pretrained() has written"
        )
    return file


def fingerprint(path: str | Path) -> str:
    """Return a hex SHA-256 by which ranks compare the adapters that they have read.

    Hosts may have copies of the files, so times are not part of it: it covers the settings, and of
    the tensors what :attr:`Checkpoint.fingerprint` does.
    """
    folder = Path(os.path.expanduser(path))
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    with open_checkpoint(_tensor_file(folder)) as checkpoint:
        digest.update(checkpoint.fingerprint.encode())
    return digest.hexdigest()


def file_versions(path: str | Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, and times of change of an adapter's files; others after any change."""
    folder, found = Path(os.path.expanduser(path)), []
    for name in (CONFIG_FILE, *_FILES):
        if is_there(folder / name, follow_links=True):  # links that lead nowhere: open_adapter
            status = (folder / name).stat()
            found.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)


def gathered(weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors, read; those of an iterator are copied before the next comes.

    Raises ``DuplicateWeightError`` for two of one name, and ``TypeError`` for what is no tensor.
    """
    is_mapping, found = isinstance(weights, Mapping), dict[str, torch.Tensor]()
    for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
        if name in found:
            raise DuplicateWeightError(f"{printable_name(name)} of the adapter comes twice")
        tensor = weight.read() if hasattr(weight, "read") else weight
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            got = f"{shorten(name)} and {type(weight).__name__}"
            raise TypeError(f"an adapter has pairs of name and whole tensor, got {got}")
        found[name] = tensor.detach() if is_mapping else tensor.detach().clone()
    return found


def base_names(weights: Mapping[str, Any], config: AdapterConfig) -> dict[str, Weight]:
    """Return an adapter's tensors under the names of the base model's modules.

    The prefix of PEFT's modules is taken off; A and B of linear layers and of embeddings get the
    names ``lora_A`` and ``lora_B``. PEFT wraps a module ``experts`` once for each of its
    parameters: the first in a ``base_layer`` of the next. A and B of experts get a dimension of
    experts, ``[experts, rank, input]`` and ``[experts, output, rank]``; they are read for that.

    Raises ``CheckpointFormatError`` if two tensors have one name then, or if wrappers of experts
    are not those that ``target_parameters`` names.
    """
    named: dict[str, Weight] = {}
    # In the order of a module, in which gate and up come before down.
    packed = [path.rpartition(".")[2] for path in config.target_parameters or ()]
    packed = sorted({*packed} - {"weight"}, key=lambda name: ("down" in name, name))
    for given, weight in weights.items():
        module, depth, rest = _unwrapped(given.removeprefix(_PREFIX))
        name = f"{module}.{rest}" if module else rest
        if packed and module.rpartition(".")[2] == "experts":
            if depth >= len(packed):
                raise CheckpointFormatError(
                    f"{printable_name(given)}: target_parameters has {len(packed)} parameters of "
                    f"experts ({', '.join(packed)}), and this tensor is of one more"
                )
            module = f"{module}.{packed[-1 - depth]}"
            name = f"{module}.{rest}"
            weight = _of_experts(weight, rest, config.rank(module))
        if name in named:
            raise CheckpointFormatError(
                f"{printable_name(given)}: another tensor of the adapter has this name, too"
            )
        named[name] = weight
    return named


@lru_cache(maxsize=1 << 12)
def _unwrapped(name: str) -> tuple[str, int, str]:
    """Return the module of A or B, how many wrappers are around its own, and the rest."""
    module, dot, rest = name.rpartition(".lora_")
    if not dot:
        return "", 0, name
    depth = 0
    while module.endswith(_INNER):
        module, depth = module.removesuffix(_INNER), depth + 1
    return module, depth, _SHORT.get(rest, f"lora_{rest}")


def _of_experts(weight: Any, name: str, rank: int) -> Weight:
    """Return A ``[experts * rank, input]`` or B ``[output, rank * experts]`` with three dimensions.

    In the second, the number of the expert counts fastest. What cannot be divided stays as it is.
    """
    dim = int(name.startswith("lora_B"))
    if len(weight.shape) != 2 or weight.shape[dim] % rank:
        return cast(Weight, weight)
    values = weight if isinstance(weight, torch.Tensor) else weight.read()
    if dim:
        return cast(torch.Tensor, values.unflatten(1, (rank, -1)).permute(2, 0, 1))
    return cast(torch.Tensor, values.unflatten(0, (-1, rank)))


def refuse_infinite(name: str, values: torch.Tensor) -> None:
    """Raise ``WeightReadError`` for a NaN or an infinity in a tensor of the adapter."""
    if not values.isfinite().all():
        raise WeightReadError(
            f"{name} of the adapter has a NaN or an infinite number: save it again"
        )


def warn_of_unnamed(modules: Iterable[str]) -> None:
    """Log modules that have A and B without being named by ``target_modules``."""
    if names := fold(sorted(modules)):
        _log.warning(
            "the adapter has A and B of modules that target_modules does not name; they are used, "
            "and PEFT leaves them out: %s",
            ", ".join(map(printable_name, names)),
        )


def warn_of_left_out(modules: Iterable[str]) -> None:
    """Log modules that ``target_modules`` names, of an adapter that has A and B of none of them."""
    if names := fold(sorted(modules)):
        _log.warning(
            "target_modules names modules that the adapter has no A and B for; they stay as they "
            "are, as with PEFT and transformers 5, where experts are no modules, and a module has "
            "only one of its names: %s",
            ", ".join(map(printable_name, names)),
        )

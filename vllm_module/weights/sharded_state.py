"""Checkpoints with separate files for each rank, which hold its tensors as they are in memory.

The files are vLLM's ``model-rank-{rank}-part-{part}.safetensors``, with a manifest. A tensor's name
is the path of a parameter or buffer; its values are cut, fused, quantized and padded for the rank.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from vllm_module.base.messages import printable, shorten
from vllm_module.config import ModelConfig, QuantizationConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.checkpoint import Checkpoint, LocalFiles
from vllm_module.weights.folder_files import FolderFiles
from vllm_module.weights.safetensors import SafetensorsFile
from vllm_module.weights.strict_json import parse_object
from vllm_module.weights.weight_file import WeightFile

MANIFEST = "sharded_state.json"
FORMAT_VERSION: Literal[1] = 1  # version of the manifest, and of the layout of parameters in memory
# Shapes alone do not tell copies of one key-value head from two that are cut.
_CUTTING = (
    "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "stored_rotary_pairs",
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts",
    "moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_AGAIN = "Write the folder again with `vllm-module shard`."

_Count = Annotated[int, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ShardFile(_Strict):
    """Size in bytes of one file, and a hex SHA-256 from :meth:`WeightFile.fingerprint`.

    The hash covers the name, the size, the whole header, and 64 bytes at 16 places of the data.
    """

    size: Annotated[int, Field(ge=0)]
    fingerprint: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class Manifest(_Strict):
    """The settings that a sharded state was written with; a load must use the same ones.

    Attributes:
        library_version: version of the writer; for information.
        architectures: the entry of config.json.
        tensor_parallel_size: number of ranks.
        enable_expert_parallel: True if each rank holds whole experts.
        dtype: dtype of parameters that are not quantized.
        config: entries of config.json by which tensors are cut and ordered.
        quantization: settings of the ``QuantizationConfig`` by which weights were quantized while
            loading; ``"config.json"`` if that file has them, ``None`` without quantization.
        ranks: the files of each rank, in the order of reading.

    """

    format_version: Literal[1]
    library_version: str
    architectures: list[str]
    tensor_parallel_size: _Count
    enable_expert_parallel: bool
    dtype: Literal["float32", "float16", "bfloat16"]
    config: dict[str, Any]
    quantization: Literal["config.json"] | dict[str, Any] | None
    ranks: list[list[ShardFile]]

    def settle(self, asked: ModelConfig, config: Any) -> ModelConfig:
        """Return ``asked`` with the files' dtype and quantization filled in where it has none.

        Raises ``UnsupportedModelError`` if it has others, or if ``config`` (config.json) has other
        architectures or sizes: these would need other files.
        """
        if config.architectures != self.architectures:
            raise _written("architectures", self.architectures, config.architectures)
        cutting = cutting_entries(config)
        for name in sorted({*cutting, *self.config}):
            if cutting.get(name) != self.config.get(name):
                by = "hf_overrides or model_impl"
                raise _written(name, self.config.get(name), cutting.get(name), by)
        if asked.dtype not in ("auto", self.dtype):
            raise _written("dtype", self.dtype, asked.dtype)
        if asked.enable_expert_parallel != self.enable_expert_parallel:
            given = asked.enable_expert_parallel
            raise _written("enable_expert_parallel", self.enable_expert_parallel, given)
        found: dict[str, Any] = {"dtype": self.dtype}
        held = self.quantization
        if not isinstance(held, str):
            wanted = quantization_settings(asked.quantization)
            if wanted not in (None, held):
                raise _written("quantization", held, wanted)
            found["quantization"] = _requested(held)
        return ModelConfig(**(dict(asked) | found))


def cutting_entries(config: Any) -> dict[str, Any]:
    """Return the entries of config.json, if present, by which tensors are cut and ordered."""
    entries = {name: getattr(config, name, None) for name in _CUTTING}
    return {name: value for name, value in entries.items() if value is not None}


def quantization_settings(asked: str | QuantizationConfig | None) -> dict[str, Any] | None:
    """Return the requested quantization in one spelling: its settings without defaults."""
    if asked is None:
        return None
    if isinstance(asked, str):
        return {"scheme": "fp8_per_tensor" if asked == "fp8" else asked}
    return asked.model_dump(mode="json", exclude_defaults=True)


def _requested(held: dict[str, Any] | None) -> Any:
    """Return a manifest's settings in the form that ``ModelConfig`` takes."""
    # A name alone may be one that no QuantizationConfig has.
    return held["scheme"] if held and set(held) == {"scheme"} else held


def _written(setting: str, held: object, asked: object, by: str = "") -> UnsupportedModelError:
    """Return the error; ``by`` names the arguments that choose the setting, if it is none."""
    how = f" ({by})" if by else ""
    return UnsupportedModelError(
        f"the sharded state was written with {setting} {held!r}, and {asked!r} was asked for: ask "
        f"for what it has{how}, or shard the original checkpoint again with the other setting"
    )


def shard_name(rank: int, part: int) -> str:
    """Return the file name of part ``part`` of ``rank``."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a sharded state on this machine.

    Raises ``CheckpointFormatError`` for one that is damaged or missing.
    """
    files = LocalFiles(folder)
    return _parsed(files, _read(files))


def _read(folder: FolderFiles) -> bytes:
    """Return the bytes of the manifest; raise if there is none."""
    if not folder.has(MANIFEST):
        raise CheckpointFormatError(
            f"{printable(folder.path)} holds no sharded state: {MANIFEST} is not there. Check the "
            "path, or write one with `vllm-module shard`"
        )
    return folder.read(MANIFEST)


def _parsed(folder: FolderFiles, data: bytes) -> Manifest:
    where = printable(folder.path / MANIFEST)
    fields = parse_object(data, where, _AGAIN)
    version = fields.get("format_version")
    if version != FORMAT_VERSION or type(version) is not int:
        raise CheckpointFormatError(
            f"{where}: format_version should be {FORMAT_VERSION}, which this version reads, and is "
            f"{shorten(version)}. {_AGAIN}"
        )
    try:
        manifest = Manifest(**fields)  # type: ignore[arg-type]
        if isinstance(manifest.quantization, dict):
            ModelConfig(model=str(folder.path), quantization=_requested(manifest.quantization))
    except (ValueError, TypeError) as error:
        raise CheckpointFormatError(
            f"{where} is damaged: {shorten(str(error))}. {_AGAIN}"
        ) from None
    if len(manifest.ranks) != manifest.tensor_parallel_size or not all(manifest.ranks):
        raise CheckpointFormatError(
            f"{where} is damaged: it should list files of {manifest.tensor_parallel_size} ranks, "
            f"and lists those of {sum(map(bool, manifest.ranks))}. {_AGAIN}"
        )
    return manifest


class ShardedState(Checkpoint):
    """The files that ``vllm-module shard`` wrote. As a mapping, it has the tensors of rank 0.

    The files of a rank are opened, and compared with the manifest, at first use. So a rank that
    reads only its own tensors opens only its own files.
    """

    def __init__(self, folder: FolderFiles) -> None:
        data = _read(folder)
        self.folder, self.manifest = folder.path, _parsed(folder, data)
        self._place = folder
        self.load_format = "sharded_state"
        self._digest = hashlib.sha256(data).hexdigest()
        self._checkpoints: dict[int, Checkpoint] = {}

    @cached_property
    def _files(self) -> tuple[WeightFile, ...]:  # type: ignore[override]
        return self.of_rank(0)._files

    @cached_property
    def _owner(self) -> dict[str, WeightFile]:  # type: ignore[override]
        return self.of_rank(0)._owner

    def of_rank(self, rank: int) -> Checkpoint:
        """Return the tensors of one rank by their paths.

        Raises ``CheckpointFormatError`` if a file is missing or is not the file that was written.
        """
        if rank not in self._checkpoints:
            with ExitStack() as opened:
                files = []
                for part, expected in enumerate(self.manifest.ranks[rank]):
                    file = _opened(self._place, shard_name(rank, part), expected, rank)
                    opened.callback(file.close)
                    files.append(file)
                self._checkpoints[rank] = self._place.checkpoint(files, "sharded_state")
                opened.pop_all()
        return self._checkpoints[rank]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of those ranks whose files are open."""
        return sum(each.nbytes for each in self._checkpoints.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far, of all ranks."""
        return sum(each.bytes_read for each in self._checkpoints.values())

    @property
    def fingerprint(self) -> str:
        """A hex SHA-256 of the manifest, which has a fingerprint of every file."""
        return self._digest

    def close(self) -> None:
        """Close the files of all ranks."""
        for each in self._checkpoints.values():
            each.close()
        self._place.close()


def _opened(folder: FolderFiles, name: str, expected: ShardFile, rank: int) -> SafetensorsFile:
    path = folder.path / name
    where = printable(path)
    if not folder.has(name):
        raise CheckpointFormatError(
            f"{where} is not there, and {MANIFEST} lists it for rank {rank}: copy it from where it "
            "was written, or shard the checkpoint again"
        )
    changed = f"It was changed after it was written, or copied in part. {_AGAIN}"
    file_bytes = folder.open(name)
    if (size := file_bytes.size) != expected.size:
        file_bytes.close()
        raise CheckpointFormatError(
            f"{where} should have {expected.size} bytes, as {MANIFEST} says, and has {size}. "
            f"{changed}"
        )
    file = SafetensorsFile(path, file_bytes=file_bytes)
    try:
        if file.fingerprint().hex() != expected.fingerprint:
            raise CheckpointFormatError(
                f"{where} should have the fingerprint {expected.fingerprint[:16]}..., as "
                f"{MANIFEST} says, and has another one. {changed}"
            )
    except BaseException:
        file.close()
        raise
    return file

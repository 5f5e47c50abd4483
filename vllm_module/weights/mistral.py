"""Mistral's own files: ``consolidated*.safetensors`` and ``params.json``.

They hold the weights under names of their own, and the rows of queries and keys in the order that
rotates neighbours, which ``q_proj_pairs`` and ``k_proj_pairs`` stand for.
Names: https://github.com/mistralai/mistral-inference (transformer_layers.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.messages import printable, shorten
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.header import Entry
from vllm_module.weights.index import DAMAGED, check_against_index, read_index
from vllm_module.weights.regular_file import is_there, read_file, refusal
from vllm_module.weights.safetensors import SafetensorsFile
from vllm_module.weights.strict_json import read_json
from vllm_module.weights.written_folder import TAKEN, write_folder

PARAMS = "params.json"
_IN_OTHERS = "take the model in Hugging Face's format"
_INCOMPLETE = f"Download the model again, or {_IN_OTHERS}"
_INDEX = "consolidated.safetensors.index.json"

_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attention.wq": "self_attn.q_proj_pairs",
    "attention.wk": "self_attn.k_proj_pairs",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
    "block_sparse_moe.gate": "block_sparse_moe.gate",
}
_EXPERTS = ("feed_forward.experts", "block_sparse_moe.experts")
_LAST = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
# Entries of params.json and what config.json calls them.
_ENTRIES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "vocab_size": "vocab_size",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
_LENGTHS = ("max_position_embeddings", "max_seq_len")
_NEEDED = ("dim", "n_layers", "n_heads", "hidden_dim", "norm_eps", "vocab_size")
_OF_TRAINING = {"model_type", "use_biases", "causal", "max_batch_size", "dtype"}


@dataclass(frozen=True)
class MistralSource:
    """A model in Mistral's own files.

    Attributes:
        path: the folder with them.
        folder: has a ``config.json`` that was written when the model was found.

    """

    path: Path
    folder: Path

    def weights(self) -> Checkpoint:
        """Open the files and check what they say of their tensors."""
        return open_mistral(self.path)


def find_mistral_source(path: Path) -> MistralSource:
    """Write a folder with the configuration that ``params.json`` has, or the one beside it.

    Raises ``CheckpointFormatError`` and ``UnsupportedModelError`` for a setting that is refused.
    """
    beside = is_there(path / "config.json")
    entries = read_json(path / "config.json", path) if beside else _config(path)
    files = {"config.json": json.dumps({**entries, "stored_rotary_pairs": True}).encode()}
    files |= {name: read_file(path / name, path) for name in TAKEN if is_there(path / name)}
    return MistralSource(path, write_folder(files, printable(path)))


def open_mistral(folder: Path) -> Checkpoint:
    """Open ``consolidated*.safetensors``; tensors get the names of Hugging Face's checkpoints.

    Those of queries and keys are ``q_proj_pairs`` and ``k_proj_pairs``, for their order of rows.
    """
    names_in: dict[str, set[str]] | None = None
    if is_there(folder / _INDEX):
        stored = read_index(folder / _INDEX, (".safetensors",))
        names_in = {file: set(map(renamed, names)) for file, names in stored.items()}
        paths = [folder / file for file in sorted(names_in)]
    else:
        try:
            paths = sorted(folder.glob("consolidated*.safetensors"))
        except OSError as error:
            raise refusal(folder, error, "listed") from error
    if not paths:
        try:
            others = sorted(path.name for path in folder.iterdir() if path.name != PARAMS)
        except OSError as error:
            raise refusal(folder, error, "listed") from error
        pth = any(name.endswith(".pth") for name in others)
        raise CheckpointFormatError(
            f"{printable(folder)} holds no consolidated*.safetensors file, as Mistral writes; it "
            f"has {', '.join(map(printable, others[:20])) or 'nothing else'}. "
            + (f"Files of Meta's (*.pth) are not read: {_IN_OTHERS}" if pth else _INCOMPLETE)
        )
    with ExitStack() as opened:
        files: list[MistralFile] = []
        for path in paths:
            if not is_there(path):
                raise CheckpointFormatError(
                    f"{printable(folder / _INDEX)} names {printable(path.name)}, which is not "
                    f"there. {DAMAGED}"
                )
            files.append(MistralFile(path, folder))
            opened.callback(files[-1].close)
            if names_in is not None:
                check_against_index(folder / _INDEX, names_in, files[-1])
        checkpoint = Checkpoint(tuple(files), "mistral")
        opened.pop_all()
    return checkpoint


class MistralFile(SafetensorsFile):
    """The tensors of one file, by the names of Hugging Face's checkpoints."""

    def _read_entries(self) -> None:
        super()._read_entries()
        entries: dict[str, Entry] = {}
        stored: dict[str, str] = {}
        for name, entry in self.entries.items():
            new = renamed(name)
            if new in entries:
                raise CheckpointFormatError(
                    f"{printable(self.path)}: {shorten(name)} and {shorten(stored[new])} are the "
                    f"same tensor, {new}. {DAMAGED}"
                )
            entries[new], stored[new] = entry, name
        self.entries = entries


def renamed(name: str) -> str:
    """Return what Hugging Face's checkpoints call a tensor; ``name`` itself if that is unknown."""
    *above, last = name.split(".")
    last = _LAST.get(last, last)
    if len(above) == 1 and above[0] in _TOP:
        return f"{_TOP[above[0]]}.{last}"
    if above[:1] != ["layers"] or len(above) < 3:
        return name
    number, inside = above[1], ".".join(above[2:])
    if inside in _LAYER:
        return f"model.layers.{number}.{_LAYER[inside]}.{last}"
    if len(above) == 6 and ".".join(above[2:4]) in _EXPERTS:
        return f"model.layers.{number}.block_sparse_moe.experts.{above[4]}.{above[5]}.{last}"
    return name


def _config(folder: Path) -> dict[str, Any]:
    """Return the entries of ``config.json`` that ``params.json`` stands for."""
    params, where = read_json(folder / PARAMS, folder), printable(folder / PARAMS)
    for name in _NEEDED:
        if name not in params:
            raise CheckpointFormatError(f"{where} has no {name}: it is damaged, or not Mistral's")
    known = {*_ENTRIES, *_LENGTHS, *_OF_TRAINING, "moe", "quantization"}
    for name, value in params.items():
        if name not in known and value not in (None, False, {}, []):
            raise UnsupportedModelError(
                f"{where}: {shorten(name)} is {shorten(value)}, which no model here knows: "
                f"{_IN_OTHERS}"
            )
    if params.get("use_biases"):
        raise UnsupportedModelError(f"{where}: use_biases is set: no model here has such biases")
    config: dict[str, Any] = {
        new: params[name] for name, new in _ENTRIES.items() if params.get(name) is not None
    }
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    config |= {"hidden_act": "silu", "sliding_window": params.get("sliding_window")}
    config["rope_theta"] = params.get("rope_theta") or 10000.0
    lengths = [params[name] for name in _LENGTHS if params.get(name) is not None]
    # Mistral's own programs take this length where a file has none.
    config["max_position_embeddings"] = lengths[0] if lengths else 128_000
    if isinstance(moe := params.get("moe"), Mapping):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config["num_local_experts"] = moe.get("num_experts")
        config["num_experts_per_tok"] = moe.get("num_experts_per_tok")
    if (quantization := params.get("quantization")) is not None:
        config["quantization_config"] = _quantization(quantization, where)
    return config


def _quantization(stored: Any, where: str) -> dict[str, Any]:
    expected = {"qformat_weight": "fp8_e4m3", "qscale_act": "TENSOR"}
    if not isinstance(stored, Mapping) or any(stored.get(k) != v for k, v in expected.items()):
        raise UnsupportedModelError(
            f"{where}: quantization should have qformat_weight fp8_e4m3 and qscale_act TENSOR, got "
            f"{shorten(stored)}"
        )
    return {"quant_method": "fp8", "activation_scheme": "static"}

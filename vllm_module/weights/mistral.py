"""Mistral's own files: ``consolidated*.safetensors`` and ``params.json``.

They use other tensor names, and order the rows of queries and keys so that neighbours are rotated
together. In our names these tensors are ``q_proj_pairs`` and ``k_proj_pairs``.
Names: https://github.com/mistralai/mistral-inference (transformer_layers.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from typing import Any

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.folder_files import FolderFiles
from vllm_module.weights.header import Entry
from vllm_module.weights.index import DAMAGED, check_against_index, parse_index
from vllm_module.weights.safetensors import SafetensorsFile
from vllm_module.weights.strict_json import parse_config
from vllm_module.weights.written_folder import TAKEN

PARAMS = "params.json"
_IN_OTHERS = "take the model in Hugging Face's format"
_INCOMPLETE = f"Download the model again, or {_IN_OTHERS}"
_WHOLE = "consolidated.safetensors"
_INDEX = f"{_WHOLE}.index.json"

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
# Entries of params.json and their names in config.json.
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


def mistral_small_files(folder: FolderFiles) -> dict[str, bytes]:
    """Return tokenizer files and ``config.json``, which may be made from ``params.json``.

    Tokenizer files are those in the folder. Raises ``CheckpointFormatError`` and
    ``UnsupportedModelError`` for a setting that is refused.
    """
    files = {"config.json": json.dumps(_entries(folder)).encode()}
    return files | {name: folder.read(name) for name in TAKEN if folder.has(name)}


def _entries(folder: FolderFiles) -> dict[str, Any]:
    if folder.has("config.json"):
        path = folder.path / "config.json"
        entries = parse_config(folder.read("config.json"), path)
    else:
        path = folder.path / PARAMS
        entries = _config(parse_config(folder.read(PARAMS), path), printable(path))
    return {**entries, "stored_rotary_pairs": True}


def open_mistral(folder: FolderFiles) -> Checkpoint:
    """Open ``consolidated*.safetensors`` under the names of Hugging Face's checkpoints.

    Queries and keys are ``q_proj_pairs`` and ``k_proj_pairs``, because their rows are in another
    order.
    """
    names_in: dict[str, set[str]] | None = None
    index = folder.path / _INDEX
    if folder.has(_INDEX):
        stored = parse_index(folder.read(_INDEX), index, (".safetensors",))
        names_in = {file: set(map(renamed, names)) for file, names in stored.items()}
        names = sorted(names_in)
    elif (listed := folder.names()) is None:
        names = [_WHOLE]
    elif not (names := [name for name in listed if fnmatch(name, "consolidated*.safetensors")]):
        others = [name for name in listed if name != PARAMS]
        pth = any(name.endswith(".pth") for name in others)
        raise CheckpointFormatError(
            f"{printable(folder.path)} holds no consolidated*.safetensors file, as Mistral writes; "
            f"it has {', '.join(map(printable, others[:20])) or 'nothing else'}. "
            + (f"Files of Meta's (*.pth) are not read: {_IN_OTHERS}" if pth else _INCOMPLETE)
        )
    with ExitStack() as opened:
        files: list[MistralFile] = []
        for name in names:
            if names_in is not None and not folder.has(name):
                raise CheckpointFormatError(
                    f"{printable(index)} names {printable(name)}, which is not there. {DAMAGED}"
                )
            files.append(MistralFile(folder.path / name, file_bytes=folder.open(name)))
            opened.callback(files[-1].close)
            if names_in is not None:
                check_against_index(index, names_in, files[-1])
        checkpoint: Checkpoint = folder.checkpoint(files, "mistral")
        checkpoint.config = partial(_entries, folder)
        opened.pop_all()
    return checkpoint


class MistralFile(SafetensorsFile):
    """The tensors of one file, under the names of Hugging Face's checkpoints."""

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
    """Return the Hugging Face name of a tensor, or ``name`` itself if it is unknown."""
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


def _config(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the entries of ``config.json`` made from ``params.json``."""
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
    # As Mistral's own programs had it when models lacked the entry (before mistral-inference 1.0).
    default = 1e6 if config["sliding_window"] is None else 1e4
    config["rope_theta"] = params.get("rope_theta") or default
    lengths = [params[name] for name in _LENGTHS if params.get(name) is not None]
    # Mistral's own programs use this length if a file has none. Of two, vLLM uses the smaller.
    wrong = [each for each in lengths if type(each) is not int]  # refused with the others
    config["max_position_embeddings"] = wrong[0] if wrong else min(lengths, default=128_000)
    if isinstance(moe := params.get("moe"), Mapping):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config["num_local_experts"] = moe.get("num_experts")
        config["num_experts_per_tok"] = moe.get("num_experts_per_tok")
    if quantization := params.get("quantization"):
        config["quantization_config"] = _quantization(quantization, where)
    return config


def _quantization(stored: Any, where: str) -> dict[str, Any]:
    """Return the ``quantization_config`` made from an entry ``quantization``.

    The entry is Mistral's own FP8 or a configuration of compressed-tensors. Source: vLLM's
    ``transformers_utils/configs/mistral.py``.
    """
    if isinstance(stored, Mapping):
        method = str(stored.get("quant_method") or "").lower().replace("_", "-")
        if method == "compressed-tensors":
            return {**stored, "quant_method": method}
        scales = stored.get("qscheme_act")
        if stored.get("qformat_weight") == "fp8_e4m3" and scales in (None, "TENSOR", "NO_SCALES"):
            dynamic = scales == "NO_SCALES"
            return {"quant_method": "fp8", "activation_scheme": "dynamic" if dynamic else "static"}
    raise UnsupportedModelError(
        f"{where}: quantization should have qformat_weight fp8_e4m3 with qscheme_act TENSOR, "
        f"NO_SCALES or none, or quant_method compressed-tensors, got {shorten(stored)}"
    )

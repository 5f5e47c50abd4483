"""Loading other formats beside their own libraries: seconds, and memory beyond the start.

Each load runs in a process of its own, from a warm page cache, in turns. A figure is printed only
if both hold the same numbers: of one weight, multiplied out. transformers maps NF4's and GPTQ's
files and copies nothing: its seconds lack that. Its memory does not, because every tensor is read
once before the peak is taken. A peer that is not installed is left
out, and that is said. transformers takes NF4 with accelerate and bitsandbytes, and GPTQ with
optimum and gptqmodel, whose first load compiles for minutes.

    python tests/bench/formats.py [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoints import plausible, shapes_of, write_qwen3
from machine import clock, memory_peak, over, spread, write
from safetensors.torch import load_file, save_file

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 8, "vocab_size": 32000, "tie_word_embeddings": True,
}  # fmt: skip
CHECKED = "model.layers.3.mlp.down_proj"
BLOCKSIZE = 64
GROUP = 128


def digest(weight: torch.Tensor) -> str:
    """Return a digest of a weight in bfloat16."""
    return hashlib.sha256(weight.bfloat16().contiguous().view(torch.uint8).numpy()).hexdigest()


def dtype_of(path: Path) -> str:
    """Return what a model computes with: gptqmodel multiplies weights out in float16."""
    return "float16" if path.name == "gptq" else "bfloat16"


def ours(path: Path) -> Callable[[], torch.Tensor]:
    """Load by get_model; return the weight that is checked."""
    from vllm_module import DeviceConfig, ModelConfig, get_model

    def load() -> torch.Tensor:
        model = get_model(
            model_config=ModelConfig(model=str(path), dtype=dtype_of(path)),
            device_config=DeviceConfig(device="cpu"),
        )
        held.append(model)
        layer = model.get_submodule(CHECKED)
        return layer.quant_method.full_precision(layer)

    return load


def by_torch(path: Path) -> Callable[[], torch.Tensor]:
    def load() -> torch.Tensor:
        state = torch.load(path / "pytorch_model.bin", weights_only=True)
        held.append(state)
        return state[f"{CHECKED}.weight"]

    return load


def by_transformers_gguf(path: Path) -> Callable[[], torch.Tensor]:
    """Load the tensors as from_pretrained(gguf_file=) does, which needs accelerate itself."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def load() -> torch.Tensor:
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
        held.append(read)
        return read["tensors"][f"{CHECKED}.weight"]

    return load


def by_transformers(path: Path) -> Callable[[], torch.Tensor]:
    """Load by from_pretrained, which takes NF4 by bitsandbytes and GPTQ by gptqmodel."""
    from transformers import AutoModelForCausalLM

    for name in PACKAGES[path.name]:
        importlib.import_module(name)  # before the load is timed

    def load() -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype_of(path))
        held.append(model)
        layer = model.get_submodule(CHECKED)
        if path.name == "nf4":
            from bitsandbytes.functional import dequantize_4bit

            return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        return layer.dequantize_weight().T

    return load


held: list[Any] = []  # what was loaded, until the process ends
WAYS = {"ours": ours, "torch.load": by_torch, "transformers' GGUF": by_transformers_gguf,
        "transformers": by_transformers}  # fmt: skip
PEERS = {"pt": "torch.load", "gguf": "transformers' GGUF", "nf4": "transformers",
         "gptq": "transformers"}  # fmt: skip
PACKAGES = {"nf4": ("accelerate", "bitsandbytes"),
            "gptq": ("accelerate", "optimum", "gptqmodel")}  # fmt: skip


def write_formats(folder: Path) -> dict[str, Path]:
    """Write one model in every format; return the path of each."""
    plain = write_qwen3(folder / "bf16", values=plausible, files=1, **SHAPE)
    (file,) = plain.glob("*.safetensors")
    tensors = load_file(file)
    config = json.loads((plain / "config.json").read_text())
    written = {"bf16": plain}
    for name in ("pt", "nf4", "gptq"):
        written[name] = folder / name
        written[name].mkdir()
        entries = config | ({} if name == "pt" else {"quantization_config": QUANTIZED[name]})
        (written[name] / "config.json").write_text(json.dumps(entries))
    torch.save(tensors, written["pt"] / "pytorch_model.bin")
    for name, convert in (("nf4", as_nf4), ("gptq", as_gptq)):
        converted: dict[str, torch.Tensor] = {}
        for each, tensor in tensors.items():
            linear = each.endswith("_proj.weight")
            wide = tensor.half() if name == "gptq" else tensor
            converted |= convert(each.removesuffix(".weight"), tensor) if linear else {each: wide}
        save_file(converted, written[name] / "model.safetensors", metadata={"format": "pt"})
    written["gguf"] = folder / "model.gguf"
    write_gguf(written["gguf"], config, tensors)
    return written


QUANTIZED = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True,
             "desc_act": False},
}  # fmt: skip


def as_nf4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=BLOCKSIZE, quant_type="nf4")
    parts = {f"{name}.weight.{key}": each for key, each in state.as_dict(packed=True).items()}
    return {f"{name}.weight": packed, **parts}


def as_gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round to the nearest of 16 steps a group, in GPTQ's layout."""
    from vllm_module.kernels.matmul.packed_words import Packing, pack

    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 7.5
    codes = (groups / scale.unsqueeze(2)).round().clamp(-8, 7).add(8).flatten(1).to(torch.uint8)
    inputs, outputs = weight.shape[1], weight.shape[0]
    return {
        f"{name}.qweight": pack(codes, Packing(4)).T.contiguous(),
        f"{name}.scales": scale.T.contiguous().half(),
        f"{name}.qzeros": torch.full(
            (inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32
        ),
        f"{name}.g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
    }


def write_gguf(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], blocks: str = "Q8_0"
) -> None:
    """Write linear weights and the embedding in a kind of blocks, by llama.cpp's own package."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", *map(str, range(config["vocab_size"] - 3))])
    writer.add_token_merges(["a b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name in shapes_of(config):
        tensor = tensors[name].float().numpy()
        stored = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(stored, tensor)
        else:
            kind = gguf.GGMLQuantizationType[blocks]
            writer.add_tensor(stored, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def child(path: Path, way: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", way, "--folder", str(path)],
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of models, and of lists and dicts of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def measured(path: Path, way: str) -> dict[str, Any]:
    """Load once; return the seconds, the memory beyond the start, and a digest of a weight."""
    load = WAYS[way](path)
    weights: list[torch.Tensor] = []
    peak = memory_peak()
    with torch.inference_mode():
        seconds = clock(lambda: weights.append(load()))
        for tensor in tensors_in(held):
            tensor.max()
    return {"seconds": seconds, "peak": peak(), "digest": digest(weights[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.folder, options.child)))
        return
    results: dict[str, Any] = {"left_out": {}}
    for name, packages in PACKAGES.items():
        if missing := [each for each in packages if importlib.util.find_spec(each) is None]:
            what = f"{PEERS[name]} needs {' and '.join(missing)}, not installed"
            results["left_out"][name] = what
    used = {"transformers", "gguf"}.union(*PACKAGES.values())
    installed = sorted(each for each in used if importlib.util.find_spec(each))
    results["packages"] = {each: importlib.metadata.version(each) for each in installed}
    with tempfile.TemporaryDirectory() as temporary:
        written = write_formats(Path(temporary))
        cases = [(name, "ours") for name in written]
        cases += [case for case in PEERS.items() if case[0] not in results["left_out"]]
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
        for turn in range(options.rounds + 1):
            for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                result = child(written[case[0]], case[1])
                if turn:  # the first warms the page cache
                    runs[case].append(result)
    for name, peer in PEERS.items():
        if (name, peer) in runs and runs[name, peer][0]["digest"] != runs[name, "ours"][0][
            "digest"
        ]:
            raise SystemExit(f"{name}: {peer} holds another weight; no figures")
    for name, why in results["left_out"].items():
        print(f"{name}: {why}")
    bf16 = [run["seconds"] for run in runs["bf16", "ours"]]
    for name in written:
        mine = runs[name, "ours"]
        row: dict[str, Any] = {
            "seconds": [run["seconds"] for run in mine],
            "peak_bytes": statistics.median(run["peak"] for run in mine),
            "over_bf16": spread(over({"a": [r["seconds"] for r in mine], "b": bf16}, "a", "b")),
        }
        seconds = statistics.median(row["seconds"])
        line = f"{name}: {seconds:.3f} s, {row['peak_bytes'] / 2**20:.0f} MiB"
        if (peer := PEERS.get(name, "")) and (name, peer) in runs:
            theirs = [run["seconds"] for run in runs[name, peer]]
            row["peer_seconds"] = theirs
            row["peer_peak_bytes"] = statistics.median(run["peak"] for run in runs[name, peer])
            row["over_peer"] = spread(over({"a": row["seconds"], "b": theirs}, "a", "b"))
            line += (
                f"; {peer} {statistics.median(theirs):.3f} s, {row['peer_peak_bytes'] / 2**20:.0f} "
                f"MiB: {row['over_peer']['median']:.2f} ({row['over_peer']['least']:.2f} to "
                f"{row['over_peer']['greatest']:.2f}) of its time"
            )
        results[name] = row
        print(line)
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()

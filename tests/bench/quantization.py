"""Memory, speed and fidelity of quantizing while loading.

Each load runs in a process of its own, so that its peak of resident memory is its own. Peaks are
over the final size of the quantized model; "load, then quantize" holds the whole model in full
precision first. Qwen3-0.6B's and 4B's shapes have random weights. The speed of the quantizer alone
is beside transformers' on the same tensor. Logits are compared with those of the same model in full
precision. A figure is printed only if the loaded bytes are those of the quantizer applied to the
whole tensor.

    python tests/bench/quantization.py [--shapes demo 0.6B 4B] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from checkpoints import plausible, read_pages, write_qwen3
from machine import clock, memory_peak, over, rounds, spread, write

from vllm_module import ModelConfig, QuantizationConfig
from vllm_module.build.model_source import build_model, read_config
from vllm_module.cli.demo.checkpoint import PARAGRAPH, write_checkpoint
from vllm_module.kernels.rows.quantize import quantize
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer, online_rules
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.weights import open_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {},  # the demo's, trained to know a paragraph by heart; in blocks of 32x32
    "0.6B": {"num_hidden_layers": 28, "tie_word_embeddings": True},
    "4B": {
        "num_hidden_layers": 36,
        "tie_word_embeddings": True,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
    },
}
FULL, THEN = "full precision", "load, then quantize"


def load(folder: Path, what: str, logits: Path | None) -> dict[str, Any]:
    """Load in one of the ways, once cold and once warm, and check what came."""
    scheme = what.removeprefix(f"{THEN}: ")
    config = read_config(folder, ModelConfig(model=str(folder)))
    trained = (folder / "tokenizer.json").exists()
    dtype = torch.float32 if trained else torch.bfloat16
    block = (32, 32) if trained else (128, 128)
    rules = None
    if what in ONLINE:
        rules = online_rules(QuantizationConfig(scheme=what, weight_block_size=block))
    model = build_model(config, dtype, torch.device("cpu"), rules)
    read_pages(folder)
    beyond = memory_peak()
    with open_checkpoint(folder) as checkpoint:
        cold = clock(lambda: model.load_weights(checkpoint))
        if what.startswith(THEN):
            cold += clock(lambda: quantize_loaded(model, scheme))
        peak = beyond()
        final = sum(t.nbytes for t in {id(t): t for t in model.state_dict().values()}.values())
        if config.tie_word_embeddings:  # counted twice, since state_dict makes views
            final -= model.lm_head.weight.nbytes
        warm = []
        if not what.startswith(THEN):
            warm = rounds({"load": lambda: model.load_weights(checkpoint)})["load"]
        if what in ONLINE and not trained:
            check(model, checkpoint, what)
    if logits is not None:
        ids = torch.arange(64) * 2377 % config.vocab_size
        if trained:
            ids = torch.tensor(Tokenizer(folder).encode(PARAGRAPH))
        with torch.no_grad():
            hidden = model(ids, torch.arange(len(ids)))
            torch.save(model.compute_logits(hidden).float(), logits)
    layers = [m for m in model.modules() if isinstance(m, QuantizableLayer)]
    return {
        "cold": cold,
        "warm": warm,
        "peak": peak,
        "final": final,
        "largest_module_bf16": max(2 * layer.weight.numel() for layer in layers[:-1]),
    }


def quantize_loaded(model: torch.nn.Module, scheme: str) -> None:
    """Quantize a model that is whole in full precision, layer by layer."""
    for layer in model.modules():
        if isinstance(layer, QuantizableLayer) and layer is not model.lm_head:
            wide = layer.weight.data
            layer.weight = layer.weight.materialize_on("meta")
            layer.quantize(EightBitMethod(ONLINE[scheme]))
            layer.load_weights({"weight": wide})


def check(model: torch.nn.Module, checkpoint: Any, name: str) -> None:
    """Compare a layer's slot with the quantizer applied to the whole tensor."""
    wide = checkpoint["model.layers.3.mlp.up_proj.weight"].read()
    layer = model.model.layers[3].mlp.gate_up_proj
    scheme, (rows, columns) = ONLINE[name], wide.shape
    block = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}
    size = block[scheme.strategy]
    quantized = torch.empty_like(wide, dtype=scheme.dtype)
    scale = torch.empty(-(-rows // size[0]), -(-columns // size[1]))
    quantize(wide, quantized, scale, size)
    held = layer.weight.data[rows:]
    assert torch.equal(held.view(torch.uint8), quantized.view(torch.uint8)), name
    assert torch.equal(layer.weight_scale.data[len(layer.weight_scale) // 2 :].reshape(-1),
                       scale.reshape(-1)), name  # fmt: skip


def quantizers(n: int = 7) -> dict[str, Any]:
    """Time the quantizer by blocks and transformers' on one tensor, and the memory both take."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    wide = plausible((4096, 4096), torch.Generator().manual_seed(0))
    quantized = torch.empty_like(wide, dtype=torch.float8_e4m3fn)
    scale = torch.empty(32, 32)
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config))
    result = theirs.convert({"w.weight": wide})
    quantize(wide, quantized, scale, (128, 128))
    differ = (result["w.weight"].view(torch.uint8) != quantized.view(torch.uint8)).float().mean()
    # They multiply by a rounded reciprocal, and bfloat16 is often half-way between two.
    assert differ < 5e-3, differ
    torch.testing.assert_close(result["w.weight_scale_inv"], scale)
    seconds = rounds(
        {
            "ours": lambda: quantize(wide, quantized, scale, (128, 128)),
            "transformers": lambda: theirs.convert({"w.weight": wide}),
        },
        n,
    )
    return {
        "seconds": seconds,
        "ours_gb_per_s": wide.nbytes / 1e9 / statistics.median(seconds["ours"]),
        "transformers_gb_per_s": wide.nbytes / 1e9 / statistics.median(seconds["transformers"]),
        "times_faster": spread(over(seconds, "transformers", "ours")),
        "bytes_that_differ": differ.item(),
    }


def child(command: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *command], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        given = options.folder, options.child, options.logits
        print(json.dumps(quantizers() if options.child == "quantizers" else load(*given)))
        return
    results: dict[str, Any] = {"quantizers": child(["--child", "quantizers"])}
    alone = results["quantizers"]
    faster = alone["times_faster"]["median"]
    print(f"128x128 blocks of one tensor: {alone['ours_gb_per_s']:.2f} GB/s of bf16, transformers "
          f"{alone['transformers_gb_per_s']:.2f}: {faster:.1f}x")  # fmt: skip
    print(
        f"{'shape, way':46} {'final':>8} {'peak':>6} {'beyond':>7} {'cold':>7} {'warm':>7} logits"
    )
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if shape == "demo":
                write_checkpoint(folder, lambda loss: None)
            else:
                write_qwen3(folder, values=plausible, **SHAPES[shape])
            expected: torch.Tensor | None = None
            for what in (FULL, *ONLINE, f"{THEN}: fp8_per_channel"):
                file = Path(temporary, "logits.pt") if shape != "4B" else None
                command = ["--folder", str(folder), "--child", what]
                result = child(command + (["--logits", str(file)] if file else []))
                result["peak_over_final"] = result["peak"] / result["final"]
                fidelity = ""
                if file is not None:
                    logits = torch.load(file, weights_only=True)
                    expected = logits if expected is None else expected
                    error = ((logits - expected).norm() / expected.norm()).item()
                    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
                    result |= {"logits_relative_error": error, "same_greedy_token": same}
                    fidelity = f"{error:.4f}, {same:.0%} same token"
                results[f"{shape}, {what}"] = result
                warm = statistics.median(result["warm"]) if result["warm"] else float("nan")
                print(
                    f"{shape + ', ' + what:46} {result['final'] / 1e6:5.0f} MB "
                    f"{result['peak_over_final']:5.2f}x "
                    f"{(result['peak'] - result['final']) / 1e6:4.0f} MB "
                    f"{result['cold']:5.2f} s {warm:5.2f} s {fidelity}",
                    flush=True,
                )
    print("peak: resident memory over the final size, at the first load; beyond: their difference")
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()

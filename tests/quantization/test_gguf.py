"""GGUF files that gguf-py writes: transformers' logits, and the file's bytes on every rank."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from vllm_module import LLM, ModelConfig, SamplingParams, get_model, vLLMModule
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks
from vllm_module.errors import (
    CheckpointFormatError,
    ShardingError,
    UnexpectedWeightError,
    UnsupportedModelError,
    WeightReadError,
)
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.layers import MergedColumnParallelLinear
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization import rules_for
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.weights import open_checkpoint

WITHIN = 1e-4  # of each logit, in float32, as in tests/models
IDS = torch.arange(2, 14)
MIXED = {  # as llama.cpp mixes types, so that q, k and v differ, and gate and up
    "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K",
    "ffn_gate": "Q4_K", "ffn_up": "F16", "ffn_down": "Q6_K", "output": "Q6_K",
    "token_embd": "Q4_K",
}  # fmt: skip
LOW = {  # as the smallest of llama.cpp's mixtures: each type of few bits
    "attn_q": "IQ2_XXS", "attn_k": "IQ2_XS", "attn_v": "Q3_K", "attn_output": "IQ3_XXS",
    "ffn_gate": "IQ2_S", "ffn_up": "IQ3_S", "ffn_down": "Q2_K", "output": "IQ4_XS",
    "token_embd": "IQ4_NL",
}  # fmt: skip
LEAST = {
    **LOW, "attn_q": "IQ1_S", "attn_k": "TQ1_0", "attn_v": "TQ2_0", "token_embd": "Q2_K",
    "ffn_down": "IQ4_NL", "ffn_gate": "IQ4_XS",
}  # fmt: skip
EXPERTS = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")  # and Q8_0
MIXED_EXPERTS = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q8_0", "ffn_down_exps": "F16"}
LOW_EXPERTS = {"ffn_gate_exps": "IQ2_XS", "ffn_up_exps": "IQ3_S", "ffn_down_exps": "IQ4_NL"}
LATENT = {"attn_k_b": "Q8_0", "attn_v_b": "IQ4_NL", "attn_q_a": "Q4_0", "ffn_up_exps": "Q4_1"}
MIXTURES = {
    "mixed-latent": LATENT,
    "mixed": MIXED, "low": LOW, "least": LEAST, "mixed-experts": MIXED_EXPERTS,
    "low-experts": LOW_EXPERTS, "mxfp4": EXPERTS,
}  # fmt: skip

written = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[1] / "weights" / "gguf_models.py"))
)


class Written(NamedTuple):
    """A file, and what transformers computes with its values."""

    path: Path
    model: Any
    logits: torch.Tensor


@pytest.fixture(scope="module")
def gguf_file(
    _quiet: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Written]:
    """Return the file of a configuration in a type or a mixture; each is written once."""
    made: dict[tuple[str, str], Written] = {}

    def get(name: str, kind: str) -> Written:
        if (name, kind) not in made:
            mixture = MIXTURES.get(kind)

            def kind_of(full: str) -> str:
                return kind if mixture is None else mixture.get(full.split(".")[-2], "Q8_0")

            model = written.new_model(written.CONFIGS[name])
            path = tmp_path_factory.mktemp(f"{name}-{kind}") / "model.gguf"
            written.write(path, model, kind_of)
            made[name, kind] = Written(path, model, written.logits(model, IDS))
        return made[name, kind]

    return get


def load(path: Path) -> vLLMModule:
    return get_model(model_config=ModelConfig(model=str(path), dtype="float32"))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model.compute_logits(model(IDS, torch.arange(len(IDS))))


ALL = [
    *(
        (name, "Q8_0", 2)
        for name in written.CONFIGS
        if name not in ("llama-narrow", "mixtral-wide")
    ),
    ("llama", "F32", 1),
    ("llama", "F16", 2),
    ("llama", "BF16", 1),
    ("llama", "Q4_0", 4),
    ("llama", "Q4_1", 2),
    ("qwen2", "Q5_0", 2),
    ("llama-biases", "Q4_0", 4),
    ("gemma2", "F16", 1),
    *(("llama-wide", "mixed", size) for size in (1, 2, 4)),
    *(("llama-wide", kind, size) for kind in ("low", "least") for size in (1, 2)),
    *(("mixtral", "mixed-experts", size) for size in (1, 4)),
    *(("mixtral-wide", "low-experts", size) for size in (1, 2)),
    ("qwen3moe", "mixed-experts", 2),
    *(("gpt-oss", "mxfp4", size) for size in (1, 2, 4)),
    *((name, "F16", 1) for name in ("glm4", "mistral3", "deepseek2", "deepseek2-groups")),
    *(("deepseek3", kind, size) for kind in ("F16", "mixed-latent") for size in (1, 4)),
]


@pytest.mark.parametrize(("name", "kind", "size"), ALL)
def test_logits_are_those_of_transformers(
    gguf_file: Callable[[str, str], Written], name: str, kind: str, size: int
) -> None:
    """Every architecture, in every type and mixture, computes what transformers does."""
    file = gguf_file(name, kind)
    for computed in run_ranks(size, lambda rank: logits(load(file.path))):
        torch.testing.assert_close(computed, file.logits, rtol=0, atol=WITHIN)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "Q8_0"), ("llama-wide", "mixed"), ("qwen2", "Q4_0")]
)
def test_transformers_reads_the_same_from_the_file(
    gguf_file: Callable[[str, str], Written], name: str, kind: str
) -> None:
    """transformers' own reader of GGUF files, with its configuration, has these logits too."""
    file = gguf_file(name, kind)
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(file.path))["config"])
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    read = load_gguf_checkpoint(str(file.path), return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"])
    expected = written.logits(theirs, IDS)
    torch.testing.assert_close(logits(load(file.path)), expected, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_may_be_apart(tmp_path: Path, kind: str) -> None:
    """Mixtral's files of 2023 have a tensor for each expert, as ``blk.0.ffn_gate.3.weight``."""
    model = written.new_model(written.CONFIGS["mixtral"])

    def change(writer: gguf.GGUFWriter) -> None:
        (tensors,) = writer.tensors
        for name in [each for each in tensors if "_exps" in each]:
            whole = tensors.pop(name)
            for expert, rows in enumerate(whole.tensor):
                one = name.replace("_exps", f".{expert}")
                writer.add_tensor(one, rows, raw_dtype=whole.dtype)

    path = written.write(tmp_path / "m.gguf", model, lambda _: kind, change)
    expected = written.logits(model, IDS)
    for computed in run_ranks(2, lambda rank: logits(load(path))):
        torch.testing.assert_close(computed, expected, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_keys_and_values_of_latents_may_be_together(tmp_path: Path, name: str) -> None:
    """Older files have ``attn_kv_b``, and sizes of heads in the keys that had those of latents."""
    model = written.new_model(written.CONFIGS[name])
    path = written.write(tmp_path / "m.gguf", model, lambda _: "Q8_0", kv_b_apart=False)
    expected = written.logits(model, IDS)
    for computed in run_ranks(2, lambda rank: logits(load(path))):
        torch.testing.assert_close(computed, expected, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("stored", [True, False])
def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path, stored: bool) -> None:
    """GLM-4.7-Flash's file has one behind the others, which counts as a block; others lack it."""
    config = written.CONFIGS["deepseek3"]
    count = config["num_hidden_layers"]
    model = written.new_model({**config, "num_hidden_layers": count + stored})

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(gguf.Keys.LLM.BLOCK_COUNT.format(arch=writer.arch))
        writer.add_block_count(count + 1)
        writer.add_nextn_predict_layers(1)
        further = [each for each in gguf.MODEL_TENSOR if each.name.startswith("NEXTN_")]
        for each in further if stored else []:
            name = f"{gguf.TENSOR_NAMES[each].format(bid=count)}.weight"
            writer.add_tensor(name, np.ones(4, dtype=np.float32))

    path = written.write(tmp_path / "m.gguf", model, lambda _: "Q8_0", change)
    model.model.layers = model.model.layers[:count]
    expected = written.logits(model, IDS)
    for computed in run_ranks(2, lambda rank: logits(load(path))):
        torch.testing.assert_close(computed, expected, rtol=0, atol=WITHIN)


@pytest.mark.parametrize(
    ("name", "period"), [("gemma3", 2), ("gemma3", 0), ("gemma2", 3), ("gpt-oss", 1)]
)
def test_every_nth_layer_is_without_a_window(tmp_path: Path, name: str, period: int) -> None:
    """As `set_swa_pattern` of llama.cpp; without the key, n is that of the published models."""
    config = {**written.CONFIGS[name], "num_hidden_layers": 3}
    dense = [period > 0 and layer % period == period - 1 for layer in range(3)]
    types = ["full_attention" if each else "sliding_attention" for each in dense]
    model = written.new_model({**config, "layer_types": types})

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32(f"{writer.arch}.attention.sliding_window_pattern", period)

    path = written.write(tmp_path / "m.gguf", model, change=change)
    expected = written.logits(model, IDS)
    torch.testing.assert_close(logits(load(path)), expected, rtol=0, atol=WITHIN)


def test_a_rank_reads_the_heads_that_it_keeps(gguf_file: Callable[[str, str], Written]) -> None:
    """Of keys that are stored transposed, a rank reads its heads alone."""
    source = ModelSource.find(ModelConfig(model=str(gguf_file("deepseek3", "mixed-latent").path)))
    name = "model.layers.1.self_attn.k_b_proj.weight"

    def work(rank: int) -> int:
        with source.open() as checkpoint:
            plan = source.build(torch.device("cpu")).plan_weights(checkpoint)
            reads = [read.source for read in plan.reads() if read.name == name]
            return sum(run.length * run.count for each in reads for run in each.runs())

    whole, *parts = run_ranks(1, work) + run_ranks(4, work)
    assert whole > 0
    assert parts == [whole // 4] * 4


def test_keys_and_values_in_one_tensor_have_no_place_beside_those_apart(
    gguf_file: Callable[[str, str], Written],
) -> None:
    """Rows of Hugging Face's ``kv_b_proj`` alternate by head, so it is refused by name."""
    file = gguf_file("deepseek3", "F16")
    model = load(file.path)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    with pytest.raises(UnexpectedWeightError, match="has no 'kv_b_proj'"):
        model.update_weights({name: file.model.state_dict()[name]})


def test_experts_are_spread_whole(gguf_file: Callable[[str, str], Written]) -> None:
    """Ranks that hold whole experts, each type in a parameter of its own, compute the same."""
    file = gguf_file("mixtral", "mixed-experts")
    config = ModelConfig(model=str(file.path), dtype="float32", enable_expert_parallel=True)

    def work(rank: int) -> torch.Tensor:
        return logits(get_model(model_config=config))

    for computed in run_ranks(2, work):
        torch.testing.assert_close(computed, file.logits, rtol=0, atol=WITHIN)


def shards_of(name: str, whole: torch.Tensor, rank: int, size: int, config: Any) -> torch.Tensor:
    """Return the rows, or the blocks of a row layer, that a rank should hold."""
    layer = name.split(".")[-2]
    if layer in ("k_proj", "k_proj_pairs", "v_proj"):
        parts = min(size, config.num_key_value_heads)
        return whole.chunk(parts)[rank * parts // size]
    if layer in ("lm_head", "embed_tokens"):
        rows = -(-len(whole) // 64) * 64 // size
        return whole[rank * rows : (rank + 1) * rows]
    return whole.chunk(size, 1 if layer in ("o_proj", "down_proj", "w2") else 0)[rank]


@pytest.mark.parametrize(("name", "kind"), [("llama-wide", "mixed"), ("mixtral", "Q4_0")])
@pytest.mark.parametrize("size", [2, 4])
def test_blocks_are_cut_and_never_changed(
    gguf_file: Callable[[str, str], Written], name: str, kind: str, size: int
) -> None:
    """The ranks hold bytes of the file: whole blocks, in the order of Hugging Face's rows."""
    file = gguf_file(name, kind)
    config = file.model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with open_checkpoint(file.path) as checkpoint:
        stored = {key: each.read() for key, each in checkpoint.items() if "weight_q" in key}
    for key in stored:
        if "_proj_pairs." in key:
            stored[key] = turned_back(stored[key], head)

    def work(rank: int) -> int:
        seen = 0
        for key, held in kept(load(file.path)):
            expected = shards_of(key, stored[key], rank, size, config)
            rows = held[: len(expected)]  # of a vocabulary, which is padded
            assert torch.equal(rows, expected), key
            assert not held[len(expected) :].any()
            seen += 1
        return seen

    assert run_ranks(size, work) == [len(stored)] * size


def turned_back(rows: torch.Tensor, head: int) -> torch.Tensor:
    """Return stored rows of q or k with one half of each head after the other."""
    order = [*range(0, head, 2), *range(1, head, 2)]
    return torch.cat([each[order] for each in rows.split(head)])


def kept(model: vLLMModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rank's part of each weight in blocks, with the name of the stored tensor."""
    for path, parameter in model.named_parameters():
        above, _, attr = path.rpartition(".")
        if isinstance(parameter, BasevLLMParameter) and "weight_q" in attr:
            for slot in parameter.slots:
                name = f"{above.rpartition('.')[0]}.{slot}" if slot else above
                region = parameter.region(slot)
                yield f"{name}.{attr}", region[0] if region.dim() > 3 else region


def test_a_fused_layer_holds_each_type_of_its_slots(
    gguf_file: Callable[[str, str], Written],
) -> None:
    """A layer has a parameter for each type, with the slots of this type, and prints itself."""
    model = load(gguf_file("llama-wide", "mixed").path)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    shapes = {name: tuple(each.shape) for name, each in attention.qkv_proj.named_parameters()}
    assert shapes == {"weight_q4_k": (1536, 1, 144), "weight_q6_k": (512, 1, 210)}
    assert mlp.gate_up_proj.weight.dtype == torch.float32
    assert mlp.gate_up_proj.weight.shape == (1024, 256)
    assert "weight=[1536, 1, 144]" in repr(model)
    full = attention.qkv_proj.quant_method.full_precision(attention.qkv_proj)
    assert full.shape == (2048, 256)


def test_a_cut_inside_of_a_block_is_refused(gguf_file: Callable[[str, str], Written]) -> None:
    """Where a rank would keep half a block, the numbers are in the message."""
    path = gguf_file("llama-narrow", "mixed").path

    def work(rank: int) -> None:
        message = r"layers\.0\.mlp\.down_proj .* shard of 128 features .* a Q6_K block of 256"
        with pytest.raises(ShardingError, match=message):
            load(path)

    run_ranks(4, work)


def test_updates_fill_blocks_in_place(gguf_file: Callable[[str, str], Written]) -> None:
    """New blocks of the same type are taken in place; those of another type have no place."""
    file = gguf_file("llama-wide", "mixed")
    model = load(file.path)
    parameter = model.model.layers[0].self_attn.qkv_proj.weight_q6_k
    before, address = parameter.clone(), parameter.data_ptr()
    with open_checkpoint(file.path) as checkpoint:
        name = next(each for each in checkpoint if each.endswith("v_proj.weight_q6_k"))
        blocks = checkpoint[name].read()
    model.update_weights({name: blocks.flip(0)})
    assert parameter.data_ptr() == address
    assert torch.equal(parameter, before.flip(0))
    model.update_weights({name: blocks})
    torch.testing.assert_close(logits(model), file.logits, rtol=0, atol=WITHIN)
    with pytest.raises(UnexpectedWeightError, match="without 'weight_q4_0'"):
        model.update_weights({name.replace("q6_k", "q4_0"): blocks[..., :18]})


@pytest.mark.parametrize("kinds", [*permutations(("Q4_0", "Q8_0", None))], ids=str)
def test_the_scales_of_every_type_of_a_layer_are_looked_at(kinds: tuple[str | None, ...]) -> None:
    """One infinite scale, in each slot alone, whichever type comes first."""
    slots = {f"{name}_proj": kind for name, kind in zip("qkv", kinds, strict=True)}
    layer = MergedColumnParallelLinear(64, [3, 3, 3], bias=False, shard_names=list(slots))
    layer.quantize(GGUFMethod(tuple(slots.items())))
    weights = {}
    for slot, kind in slots.items():
        if kind is None:
            weights[f"{slot}.weight"] = torch.ones(3, 64)
            continue
        block = BLOCK_TYPES[kind]  # its first two bytes are the scale, a float16
        blocks = torch.zeros(3, 64 // block.values, block.nbytes, dtype=torch.uint8)
        weights[f"{slot}.weight_{kind.lower()}"] = blocks
    layer.load_weights(weights)
    for name, blocks in weights.items():
        if blocks.dtype == torch.uint8:
            broken = blocks.clone()
            broken[2, 1, 1] = 0x7C
            slot, _, parameter = name.partition(".")
            with pytest.raises(WeightReadError, match=rf"{parameter} .*{slot}.* has inf"):
                layer.update_weights({name: broken})
            layer.load_weights(weights)


def test_a_plan_reads_what_a_rank_keeps(gguf_file: Callable[[str, str], Written]) -> None:
    """A plan of one of four ranks accounts for all names, and reads whole blocks."""
    source = ModelSource.find(ModelConfig(model=str(gguf_file("llama", "Q4_0").path)))

    def work(rank: int) -> int:
        with source.open() as checkpoint:
            plan = source.build(torch.device("cpu")).plan_weights(checkpoint)
            assert plan.report.ok
            assert {name for names in plan.report.loaded.values() for name in names} == {
                *checkpoint
            }
            reads = (read.source for read in plan.reads())
            return sum(each.shape.numel() for each in reads if each.dtype == torch.uint8)

    with source.open() as checkpoint:
        blocks = sum(each.shape.numel() for name, each in checkpoint.items() if "weight_q" in name)
    whole, quarter = run_ranks(1, work)[0], run_ranks(4, work)[0]
    assert whole == blocks
    assert blocks / 4 <= quarter < blocks / 2  # two key-value heads for four ranks


@pytest.mark.parametrize("size", [1, 2])
def test_greedy_tokens_through_llm(gguf_file: Callable[[str, str], Written], size: int) -> None:
    """The engine generates transformers' greedy tokens from a file, with ranks in processes too."""
    file = gguf_file("qwen2", "Q8_0")
    prompt = IDS.tolist()
    ids = torch.tensor([prompt])
    theirs = file.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    llm = LLM(
        str(file.path), dtype="float32", skip_tokenizer_init=True, device="cpu",
        tensor_parallel_size=size,
    )  # fmt: skip
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        assert list(output.outputs[0].token_ids) == theirs[0, len(prompt) :].tolist()
    finally:
        llm.close()


def test_types_in_a_configuration_are_checked(tmp_path: Path) -> None:
    """A configuration that is not the source's own is refused by name."""
    with pytest.raises(CheckpointFormatError, match="types of config\\.json should map"):
        rules_for(None, {"quant_method": "gguf"})
    with pytest.raises(UnsupportedModelError, match="type NVFP4 are not supported"):
        rules_for(None, {"quant_method": "gguf", "types": {"a": "NVFP4"}})
    with pytest.raises(UnsupportedModelError, match="quantized already, by 'gguf'"):
        rules_for("fp8", {"quant_method": "gguf", "types": {}})

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, ModelConfig, get_model, tensor_parallel
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.cli.commands.plan import parse_size
from vllm_module.cli.output import grouped
from vllm_module.cli.rank_plan import PAGE_SIZE, RankPlan, plan_ranks
from vllm_module.cli.tensor_plan import Kept, KeptPiece, TensorPlan, tensor_rows
from vllm_module.core.report import LoadReport, fold
from vllm_module.distributed import run_ranks
from vllm_module.hf_config import HFConfig
from vllm_module.layout import TransferPlan, layout_json, layout_of_state_dict, read_layout
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization import rules_for
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.testing import random_weights, write_checkpoint

Run = Callable[..., Any]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_bytes_planned_are_the_bytes_loaded(run: Run, folder: Path, tp_size: int) -> None:
    """The bytes in a plan's byte ranges are the values that each rank loads."""
    plan = run("plan", folder, "--tp", tp_size, "--json").json
    row_bytes = {
        tensor["name"]: tensor["shape"][-1] * 2
        for tensor in run("inspect", folder, "--json").json["tensors"]
    }
    for rank in plan["ranks"]:
        with tensor_parallel(rank=rank["rank"], size=tp_size):
            model = get_model(model_config=ModelConfig(model=str(folder)))
        parts = defaultdict(list)
        for read in rank["reads"]:
            begin, end = read["byte_range"]
            raw = (folder / read["file"]).read_bytes()[begin:end]
            each, stride = read["bytes"] // read["pieces"], row_bytes[read["name"]]
            pieces = [raw[i * stride :][:each] for i in range(read["pieces"])]
            kept = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.bfloat16)
            parts[read["parameter"]].append(kept.view(read["shape"]))
        assert set(parts) <= set(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            # The slots are in order, and padding follows. A rank may hold nothing but padding.
            planned = torch.cat([*parts[name], parameter[:0]])
            assert torch.equal(planned, parameter[: len(planned)])
            assert not parameter[len(planned) :].any()
        assert rank["bytes_read"] == sum(read["bytes"] for read in rank["reads"])


def test_a_layout_in_the_names_of_a_trainer(run: Run, tmp_path: Path) -> None:
    """It has transformers' fused tensors; what is no layout, or of another model, is refused."""
    config = AutoConfig.for_model(
        "mixtral", vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    own, trainer = tmp_path / "layout.json", tmp_path / "trainer.json"
    sharded = layout_of_state_dict(model.state_dict())
    trainer.write_bytes(layout_json(sharded))
    command = ["plan", tmp_path, "--tp", 2, "--layout", own, "--source", trainer]
    for stages in (1, 2):
        assert run(*command, "--pp", stages).code == 0
        layout = read_layout(own)
        found = {each.name: each.shape for each in layout.tensors}
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert (found, layout.ranks) == (expected, 2 * stages)
        assert TransferPlan(sharded, layout).target_ranks == 2 * stages
    with LLM(str(tmp_path), device="cpu", kv_cache_memory_bytes=1 << 20) as llm:
        run("plan", tmp_path, "--layout", own, "--source", trainer)
        assert read_layout(own) == llm.layout(sharded)
    own.unlink()
    failed = run("plan", tmp_path, "--source", trainer)
    assert (failed.code, "--layout FILE" in failed.err) == (2, True)
    trainer.write_bytes(layout_json(layout_of_state_dict({"model.w": torch.ones(2)})))
    failed = run(*command)
    assert (failed.code, "model.w: MixtralModel has no 'w'" in failed.err) == (1, True)
    trainer.write_text("{}")
    failed = run(*command)
    assert (failed.code, "trainer.json" in failed.err, own.exists()) == (1, True, False)


def test_stages_read_each_tensor_once(run: Run, folder: Path) -> None:
    """Two stages of two ranks read what one rank reads; a layer's pages are on its stage."""
    whole = run("plan", folder, "--json").json
    stages = run("plan", folder, "--pp", 2, "--tp", 2, "--json").json
    assert stages["pipeline_parallel_size"] == 2
    ranks = [rank for stage in stages["stages"] for rank in stage["ranks"]]
    assert len(ranks) == 4
    (one,) = whole["ranks"]
    names = [
        {read["name"] for rank in s["ranks"] for read in rank["reads"]} for s in stages["stages"]
    ]
    assert set.union(*names) == {read["name"] for read in one["reads"]}
    pages = [stage["ranks"][0]["kv_page_bytes"] for stage in stages["stages"]]
    assert sum(pages) * 2 == one["kv_page_bytes"]
    refused = run("plan", folder, "--pp", 99)
    assert refused.code == 1
    assert "99 pipeline stages cannot share" in refused.err
    wrong = run("plan", folder, "--pp", 2, "--html", "page.html")
    assert wrong.code == 2
    assert "it shows one stage" in wrong.err


def test_one_table_for_all_ranks(run: Run, folder: Path) -> None:
    """A line shows a projection of all layers: what a rank keeps, its bytes, parameter and slot."""
    result = run("plan", folder, "--tp", 2)
    assert (result.code, result.err) == (0, "")
    lines = {line.split("  ")[0]: line for line in result.out.splitlines()}
    for slot, kept, nbytes in (
        ("q_proj", "[32/2, 32]", "3.07 kB"),
        ("k_proj", "[16/2, 32]", "1.54"),
    ):
        line = lines[f"model.layers.{{0..2}}.self_attn.{slot}.weight"]
        assert f"  {kept}  " in line
        assert "  cut in 2  " in line
        assert nbytes in line
        assert line.endswith(f"  {slot} of …qkv_proj.weight")
    assert "  [32, 32/2]  " in lines["model.layers.{0..2}.self_attn.o_proj.weight"]
    norm = ["model.norm.weight", "all", "[32]", "replicated", "64", "B"]
    assert lines["model.norm.weight"].split() == norm
    every = run("plan", folder, "--tp", 2, "--all").out
    assert "\nmodel.layers.1.self_attn.q_proj.weight  " in every
    assert "\x1b" not in result.out + every
    copies = run("plan", folder, "--tp", 4).out
    assert re.search(r"k_proj\.weight +all +\[16/2, 32\] +cut in 2, 2 copies ", copies)


def test_ranks_that_differ_have_lines_and_columns_of_their_own(run: Run, folder: Path) -> None:
    """With a padded vocabulary, the last rank keeps fewer rows, and there are columns by rank."""
    out = run("plan", folder, "--tp", 4).out
    embedding = [line.split() for line in out.splitlines() if line.startswith("model.embed_tokens")]
    assert [(line[1], line[2:5]) for line in embedding] == [
        ("0..1", ["[48", "of", "130,"]),
        ("2", ["[34", "of", "130,"]),
        ("3", ["nothing", "of", "[130,"]),
    ]
    assert re.search(r"^memory +ranks 0\.\.1 +rank 2 +rank 3$", out, re.MULTILINE)


def test_tensors_that_are_fused_or_tied_on_disk(run: Run, edited: Callable[..., Path]) -> None:
    """A fused tensor has a line with the pieces that are kept; a tied one is only compared."""

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            parts = [f"model.layers.{layer}.self_attn.{slot}_proj.weight" for slot in "qkv"]
            fused = torch.cat([tensors.pop(name) for name in parts])
            tensors[parts[0].replace("q_proj", "qkv_proj")] = fused
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    out = run("plan", edited(fuse, tie_word_embeddings=True), "--tp", 2).out
    pieces = r"\[16 of 64, 32\] \+ \[8 of 64, 32\] \+ \[8 of 64, 32\]"
    assert re.search(rf"qkv_proj\.weight +all +{pieces} +cut in 2 +6.14 kB$", out, re.MULTILINE)
    assert re.search(r"^model\.embed_tokens.* compared .* tied$", out, re.MULTILINE)


def test_the_plan_of_70b_parameters_fits_a_screen(
    run: Run, tmp_path: Path, write_large: Callable[..., None]
) -> None:
    """Headers alone are planned for 8 ranks in less than 45 lines."""
    write_large(tmp_path, layers=80)
    result = run("plan", tmp_path, "--tp", 8, "--memory", "80GiB")
    assert result.code == 0
    assert len(result.out.splitlines()) < 45
    (size,) = re.findall(r"^weights and buffers, in bfloat16 +(.*)$", result.out, re.MULTILINE)
    assert size == "17.6 GB"
    (kv,) = re.findall(r"^KV cache of 131,072 tokens, in bfloat16 +(.*)$", result.out, re.MULTILINE)
    assert kv == "5.37 GB"


def test_ranks_share_a_model_and_layers_a_cut(
    tmp_path: Path, write_large: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model is built for all ranks, and a rank cuts a tensor once for all layers."""
    calls: Counter[str] = Counter()

    def counted(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return original(*arguments)

        # Counted: how often it is called shows in no output.
        monkeypatch.setattr(cls, name, call)

    counted(ModelSource, "build")
    counted(BasevLLMParameter, "pieces")
    cuts = {}
    for layers, ranks in ((2, 4), (6, 4), (6, 8)):
        write_large(tmp_path, layers=layers)
        source = ModelSource.find(ModelConfig(model=str(tmp_path)))
        calls.clear()
        with source.open() as checkpoint:
            plans = plan_ranks(source, checkpoint, ranks)
        assert (calls["build"], len(plans)) == (1, ranks)
        assert sum(1 for _ in plans[-1].reads()) == 9 * layers + 3
        cuts[layers, ranks] = calls["pieces"]
    assert cuts[2, 4] == cuts[6, 4]
    assert cuts[6, 8] == 2 * cuts[6, 4]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_kv_cache_is_that_of_the_engine(run: Run, folder: Path, kv_dtype: str) -> None:
    """Its bytes are those that an engine allocates for as many pages."""
    options = ("--context-len", 33, "--kv-cache-dtype", kv_dtype)
    (rank,) = run("plan", folder, *options, "--json").json["ranks"]
    source = ModelSource.find(ModelConfig(model=str(folder)))
    dtype = torch.float8_e4m3fn if kv_dtype == "fp8" else torch.bfloat16
    cache = KVCache(source.build(torch.device("cpu")), 3, 16, torch.device("cpu"), dtype)
    assert rank["kv_cache_bytes"] == cache.nbytes
    assert rank["needed_bytes"] == rank["device_bytes"] + cache.nbytes


@given(st.integers(0, 1000), st.integers(1, 99), st.integers(0, 500), st.integers(0, 4000))
def test_as_many_tokens_fit_as_are_said_to(
    weights: int, page: int, state: int, memory: int
) -> None:
    """One token more than ``kv_cache_tokens`` needs more memory, also beside states."""
    nothing: Any = None
    rank = RankPlan(0, [], LoadReport(), 0, weights, {}, 0, page, state, 0.0, {}, nothing, nothing)
    tokens = rank.kv_cache_tokens(memory)
    assert rank.needed_bytes(tokens + 1) > memory
    assert tokens == 0 or rank.needed_bytes(tokens) <= memory


@given(*[st.integers(0, 500)] * 4, st.integers(0, 99))
def test_the_peak_is_that_of_the_larger_moment(
    weights: int, quantizing: int, page: int, state: int, tokens: int
) -> None:
    """Weights are there at both moments: while one is quantized, and beside a full cache."""
    nothing: Any = None
    rank = RankPlan(
        0, [], LoadReport(), 0, weights, {}, quantizing, page, state, 0.0, {}, nothing, nothing
    )  # fmt: skip
    pages = len(range(0, tokens, PAGE_SIZE))
    moments = [weights + quantizing, weights + state + page * pages]
    assert rank.needed_bytes(tokens) == max(moments)


def test_what_does_not_fit(run: Run, folder: Path) -> None:
    """The exit code is 1, and the message has the ranks and the numbers."""
    quantized = ("--tp", 4, "--context-len", 1, "--quantization", "fp8_per_tensor")
    ranks = run("plan", folder, *quantized, "--json").json["ranks"]
    needed = [rank["needed_bytes"] for rank in ranks]
    memory = max(needed)
    fits = run("plan", folder, *quantized, "--memory", memory)
    assert fits.code == 0
    assert f"fits into {memory}; " in fits.out
    result = run("plan", folder, *quantized, "--memory", f"{memory - 1}B")
    assert result.code == 1
    assert result.err.startswith(f"error: this does not fit: each rank has {memory - 1}B (")
    assert "ranks 0..3 need " in result.err
    assert re.search(r"^left of \d+B .*-1 B\b", result.out, re.MULTILINE)
    for rank in run("plan", folder, "--tp", 4, "--memory", "1MB", "--json").json["ranks"]:
        left = 1_000_000 - rank["device_bytes"]
        page = rank["kv_page_bytes"]
        assert rank["kv_cache_tokens"] == left // page * 16


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 80 << 30),
        ("24 gb", 24 * 10**9),
        ("1.5MB", 1_500_000),
        ("7000000", 7000000),
        ("7 bytes", 7),
    ],
)
def test_sizes_of_memory(text: str, nbytes: int) -> None:
    """Decimal and binary units are accepted in any case; a number alone is bytes."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "3 pounds", "80GiB a", "inf", "9" * 400])
def test_other_sizes_are_wrong_usage(run: Run, folder: Path, text: str) -> None:
    """The message shows sizes that are accepted."""
    result = run("plan", folder, f"--memory={text}")
    assert (result.code, result.out) == (2, "")
    assert "is not a size such as 80GiB" in result.err


def test_a_small_number_without_a_unit_is_wrong_usage(run: Run, folder: Path) -> None:
    """--memory 80 is no device of 80 bytes; 80B is one."""
    result = run("plan", folder, "--memory", "80")
    assert (result.code, result.out) == (2, "")
    assert "write 80GB or 80GiB, or 80B if you mean bytes" in result.err
    assert run("plan", folder, "--memory", "80B").code == 1


def test_predicted_memory(run: Run, folder: Path) -> None:
    """Device memory is that of parameters and buffers; only casts and copies to CUDA are staged."""
    plans = {
        dtype: run("plan", folder, "--tp", 2, "--dtype", dtype, "--json").json["ranks"]
        for dtype in ("bfloat16", "float32")
    }
    for dtype, ranks in plans.items():
        config = ModelConfig(model=str(folder), dtype=dtype)  # type: ignore[arg-type]
        models = run_ranks(2, lambda _, c=config: get_model(model_config=c))  # type: ignore[misc]
        for model, rank in zip(models, ranks, strict=True):
            storages = {
                t.untyped_storage().data_ptr(): t.nbytes
                for t in (*model.parameters(), *model.buffers())
            }
            assert rank["device_bytes"] == sum(storages.values())
    assert all(rank["staging_bytes"]["cpu"] == 0 for rank in plans["bfloat16"])
    assert all(rank["staging_bytes"]["cpu"] > 0 for rank in plans["float32"])
    assert all(rank["staging_bytes"]["cuda"] > 0 for rank in plans["bfloat16"])


def test_problems_are_listed_and_the_exit_code_says_so(
    run: Run, edited: Callable[..., Path]
) -> None:
    """The message and the JSON name missing, unexpected and misshapen tensors."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.extra.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(7)

    path = edited(damage)
    result = run("plan", path, "--tp", 2)
    assert result.code == 1
    assert "model.layers.{0..2}.self_attn.k_proj.weight  " in result.out
    assert result.err.startswith("error: Qwen3ForCausalLM refuses this checkpoint.\n")
    for name in ("layers.1.self_attn.q_proj.weight", "model.extra.weight", "model.norm.weight"):
        assert name in result.err
    assert "Traceback" not in result.err
    found = run("plan", path, "--json")
    assert found.code == 1
    assert found.json["missing"] == [
        [
            "model.layers.1.self_attn.q_proj.weight",
            "expected shape [32, 32], slot 'q_proj' of qkv_proj.weight",
        ]
    ]
    assert [name for name, _ in found.json["unexpected"]] == ["model.extra.weight"]
    assert [name for name, _ in found.json["misshapen"]] == ["model.norm.weight"]


def test_skipped_tensors_are_named_with_their_rule(run: Run, edited: Callable[..., Path]) -> None:
    """A skipped tensor is listed, and the exit code is 0."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(4)

    path = edited(add)
    result = run("plan", path)
    assert result.code == 0
    assert "skipped 1: rotary frequencies are computed from the configuration" in result.out
    assert list(run("plan", path, "--json").json["skipped"]) == ["model.rotary_emb.inv_freq"]


def test_a_group_with_different_numbers_of_experts() -> None:
    """Layers with different numbers of experts are one group, which two patterns cover exactly."""
    names = [f"layers.{i}.experts.{j}.w" for i, most in ((0, 2), (1, 4)) for j in range(most)]
    other = "layers.0.experts.0.scale"
    assert grouped([*names, other], lambda name: name, len) == [names, [other]]
    assert fold(names) == ["layers.0.experts.{0..1}.w", "layers.1.experts.{0..3}.w"] or fold(
        names
    ) == ["layers.{0..1}.experts.{0..1}.w", "layers.1.experts.{2..3}.w"]


def test_packed_experts_are_counted() -> None:
    """A tensor with many experts is cut in as many pieces, whose shape is written once."""
    pieces = (KeptPiece(0, 0, 100, 1, (1, 64, 96)),) * 128
    name = "layers.0.mlp.experts.gate_up_proj"
    kept = Kept((128, 64, 192), "bfloat16", False, (pieces,) * 2)
    plan = TensorPlan(name, kept, name, None, None, None, None)
    (row,) = tensor_rows([plan], every=False)[1]
    assert row[1] == "128 x [128/128, 64, 192/2]"


def test_what_is_put_in_order_is_not_called_quantized(run: Run, tmp_path: Path) -> None:
    """Memory to put tensors in order on a GPU has its own line; pieces of many sizes have rows."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    }  # fmt: skip
    model = build_model(HFConfig(**config), torch.float32, torch.device("cpu"))
    write_checkpoint(tmp_path, random_weights(model.expected_weights()), config=config)
    out = run("plan", tmp_path, "--tp", 2).out
    assert "quantized" not in out
    assert "\ncast or put in order on a GPU, at the peak  " in out
    assert re.search(r"linear_attn\.conv1d\.weight .*\[4 of 32, 1, 4\] .*\[8 of 32, 1, 4\]", out)


def test_matrices_that_are_stored_as_vectors_are_counted_as_such(run: Run, tmp_path: Path) -> None:
    """Rows and columns that a rank reads of them are entries of the checkpoint's tensor."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 256,
        "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        },
    }  # fmt: skip
    rules = rules_for(None, config["quantization_config"])
    model = build_model(HFConfig(**config), torch.float32, torch.device("cpu"), rules)
    write_checkpoint(tmp_path, random_weights(model.expected_weights()), config=config)
    out = run("plan", tmp_path, "--tp", 2).out
    for name in ("q_proj", "o_proj"):  # rows, and columns
        assert re.search(rf"self_attn\.{name}\.weight  +\[8192/2, 1\] +cut in 2 ", out)
        assert re.search(rf"self_attn\.{name}\.weight\.absmax  +\[256/2\] +cut in 2 ", out)


def test_experts_of_a_layer_share_a_line(run: Run, tmp_path: Path) -> None:
    """A projection of all experts and layers, each cut or spread over the ranks, is one line."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "num_local_experts": 3, "num_experts_per_tok": 2,
    }  # fmt: skip
    model = build_model(HFConfig(**config), torch.float32, torch.device("cpu"))
    write_checkpoint(tmp_path, random_weights(model.expected_weights()), config=config)
    lines = [line for line in run("plan", tmp_path, "--tp", 2).out.splitlines() if ".w1." in line]
    assert [re.split(" {2,}", line) for line in lines] == [
        [
            "model.layers.{0..1}.block_sparse_moe.experts.{0..2}.w1.weight",
            "all",
            "[8/2, 16]",
            "cut in 2",
            "1.54 kB",
            "{0..2}.w1 of …w13.weight",
        ]
    ]
    spread = run("plan", tmp_path, "--tp", 2, "--enable-expert-parallel").out
    (line,) = [line for line in spread.splitlines() if ".w1." in line]
    assert "1.02 kB to 2.05 kB" in line  # one expert of each layer, or two

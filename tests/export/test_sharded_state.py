"""A sharded state gives each rank the bits that loading the original gives it."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file
from torch import nn

from vllm_module import (
    LLM,
    LoadConfig,
    ModelConfig,
    QuantizationConfig,
    SamplingParams,
    get_model,
    tensor_parallel,
    vLLMModule,
)
from vllm_module.build import registry
from vllm_module.build.held import load_from, plan_from
from vllm_module.build.model_source import ModelSource, read_config
from vllm_module.cli.rank_plan import plan_ranks
from vllm_module.distributed import run_ranks
from vllm_module.errors import (
    CheckpointFormatError,
    MisshapenWeightError,
    MissingWeightError,
    ModelNotReadyError,
    ShardingError,
    UnexpectedWeightError,
    UnsupportedModelError,
    WeightReadError,
)
from vllm_module.export import sharded_state
from vllm_module.export.compressed import convert
from vllm_module.export.sharded_state import shard
from vllm_module.layers import FusedMoE
from vllm_module.models.llama import LlamaForCausalLM
from vllm_module.weights import open_checkpoint
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.sharded_state import Manifest, cutting_entries

BLOCKS = QuantizationConfig(scheme="fp8_per_block", weight_block_size=(8, 8))
INT4 = QuantizationConfig(scheme="int4_per_group", group_size=8)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied, 1 rank": ("gemma2", 1, {}),
    "tied, 4 ranks, fewer heads, padding": ("qwen2", 4, {}),
    "per tensor": ("qwen2", 4, {"quantization": "fp8"}),
    "per block": ("qwen2", 2, {"quantization": BLOCKS}),
    "int8": ("qwen2", 2, {"quantization": "int8_per_channel_weight_only"}),
    "experts cut": ("qwen3-moe", 2, {"quantization": "fp8"}),
    "experts spread": ("qwen3-moe", 4, {"enable_expert_parallel": True}),
    "latent attention": ("deepseek-v3", 2, {"quantization": "fp8"}),
    "padding between rows that alternate": ("gpt-oss", 2, {"quantization": "fp8_per_channel"}),
    "padding between rows of four bits": ("gpt-oss", 2, {"quantization": INT4}),
    "stored otherwise than held": ("gpt2", 2, {"quantization": "fp8_per_channel"}),
}


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the bytes of every parameter and buffer, also of those that are computed."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8) for n, t in named}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


class Written(NamedTuple):
    """A sharded state, what it was written from and on how many ranks."""

    folder: Path
    original: Path
    size: int
    settings: dict[str, Any]

    def load(self, rank: int, **settings: Any) -> vLLMModule:
        """Load one rank."""
        with tensor_parallel(rank=rank, size=self.size):
            return get_model(model_config=ModelConfig(model=str(self.folder), **settings))


@pytest.fixture(scope="module")
def written(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Written]:
    """Return the sharded state of a case; each is written once."""
    made: dict[str, Written] = {}

    def get(case: str) -> Written:
        if case not in made:
            name, size, settings = CASES[case]
            folder, original = tmp_path_factory.mktemp("out") / "state", checkpoint(name)
            shard(ModelConfig(model=str(original), **settings), size, folder, part_bytes=20_000)
            made[case] = Written(folder, original, size, settings)
        return made[case]

    return get


@pytest.fixture
def copied(written: Callable[[str], Written], tmp_path: Path) -> Written:
    """A copy of a sharded state for 2 ranks, to damage."""
    state = written("per block")
    shutil.copytree(state.folder, tmp_path / "copy")
    return state._replace(folder=tmp_path / "copy")


@pytest.mark.parametrize("case", CASES)
def test_each_rank_gets_the_bits_of_an_ordinary_load(
    written: Callable[[str], Written], case: str
) -> None:
    """Parameters and computed buffers are equal bit for bit, and nothing has to be asked for."""
    state = written(case)
    spread = {k: v for k, v in state.settings.items() if k == "enable_expert_parallel"}

    def both(rank: int) -> tuple[vLLMModule, vLLMModule]:
        original = ModelConfig(model=str(state.original), **state.settings)
        held = ModelConfig(model=str(state.folder), **spread)
        return get_model(model_config=held), get_model(model_config=original)

    ids = torch.tensor([3, 1, 4, 1, 5])
    for held, original in run_ranks(state.size, both):
        assert_same(bits(held), bits(original))
        assert held.load_report is not None
        assert held.load_report.ok
        held.check_ready()
    if state.size == 1:
        with torch.no_grad():
            positions = torch.arange(len(ids))
            assert torch.equal(held(ids, positions), original(ids, positions))


@pytest.mark.parametrize("case", [case for case in CASES if "padding between" in case])
def test_what_no_tensor_fills_is_zero(written: Callable[[str], Written], case: str) -> None:
    """Of 96 features in blocks of 32, the second rank has one of gate and one of up.

    Each has room for two. As safetensors reads them, codes and scales of what is there are not 0.
    """
    names = []
    for path in written(case).folder.glob("model-rank-1-part-*.safetensors"):
        for name, tensor in load_file(path).items():
            if ".w13.weight" in name:
                rows = tensor.float().unflatten(1, (4, 32))
                assert rows.any(-1).any(-1).any(0).tolist() == [True, False, True, False], name
                names.append(name)
    assert {name.rpartition(".")[2] for name in names} == {"weight", "weight_scale"}


def test_files_hold_what_a_rank_holds_and_tied_tensors_once(
    written: Callable[[str], Written],
) -> None:
    """safetensors reads the parts, whose tensors are the model's parameters by their paths."""
    state = written("per tensor")
    stored: dict[str, torch.Tensor] = {}
    parts = sorted(state.folder.glob("model-rank-3-part-*.safetensors"))
    assert len(parts) > 1
    for part in parts:
        tensors = load_file(part)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 20_000 or len(tensors) == 1
        stored |= tensors
    held = dict(state.load(3).named_parameters())  # a tied one once
    assert stored.keys() == held.keys()
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert all(torch.equal(t.float(), stored[name].float()) for name, t in held.items())


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("count", [2, 5])
def test_a_file_may_be_full_to_the_last_byte(
    checkpoint: Callable[..., Path], tmp_path: Path, count: int, more: int
) -> None:
    """The files are those of huggingface_hub's division, at sizes around that of some tensors."""
    original = checkpoint("qwen2")
    model = get_model(model_config=ModelConfig(model=str(original)))
    held = dict(model.named_parameters())  # a tied one once
    sizes = [tensor.nbytes for tensor in held.values()]
    limit = sum(sizes[:count]) + more  # the first ones fill a file, or all but one do
    assert limit >= max(sizes)
    division = split_torch_state_dict_into_shards(held, max_shard_size=limit)
    shard(ModelConfig(model=str(original)), 1, tmp_path / "out", part_bytes=limit)
    parts = sorted((tmp_path / "out").glob("model-rank-0-part-*.safetensors"))
    found = [load_file(part).keys() for part in parts]
    assert found == [set(names) for names in division.filename_to_tensors.values()]


def test_a_tensor_that_is_larger_than_a_file_has_one_for_itself(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The files are those of huggingface_hub's division, and none is empty."""
    original = checkpoint("qwen2")
    held = dict(get_model(model_config=ModelConfig(model=str(original))).named_parameters())
    division = split_torch_state_dict_into_shards(held, max_shard_size=1)
    shard(ModelConfig(model=str(original)), 1, tmp_path / "out", part_bytes=1)
    parts = sorted((tmp_path / "out").glob("model-rank-0-part-*.safetensors"))
    found = {frozenset(load_file(part)) for part in parts}
    assert found == {frozenset(names) for names in division.filename_to_tensors.values()}
    assert len(parts) == len(held)


def test_digests_find_a_bit_that_no_load_looks_at(copied: Written) -> None:
    """A load that compares digests names the tensor and the rank of a bit that is another."""
    asked = LoadConfig(digests=True)

    def load(rank: int, config: LoadConfig) -> vLLMModule:
        with tensor_parallel(rank=rank, size=copied.size):
            settings = ModelConfig(model=str(copied.folder))
            return get_model(model_config=settings, load_config=config)

    reports = [load(rank, asked).load_report for rank in range(copied.size)]
    assert sum(report.digests for report in reports).tensors
    path = sorted(copied.folder.glob("model-rank-1-part-*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    place = len(data) - 200  # between two samples of the fingerprint
    data[place] ^= 1
    (changed,) = (n for n, _, e in open_checkpoint(path).headers() if e.begin <= place < e.end)
    path.write_bytes(data)
    load(0, asked)
    load(1, LoadConfig())
    with pytest.raises(WeightReadError, match=r"rank 1 read values whose digests") as refused:
        load(1, asked)
    assert changed.rpartition(".")[2] in str(refused.value)
    (copied.folder / "digests.json").unlink()
    load(1, asked)


def test_a_rank_reads_its_files_once_and_in_order(
    written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes read are the bytes kept, assigned in the order in which they lie in the files."""
    state = written("per block")
    source = ModelSource.find(ModelConfig(model=str(state.folder)))
    with tensor_parallel(rank=1, size=2), source.open() as opened:
        model = source.build(torch.device("cpu"), len(opened))
        plan = plan_from(model, opened)
        places = [(each.weight.file, each.weight.byte_range[0]) for each in plan.fills]
        assert places == sorted(places)
        load_from(model, opened)
        kept = sum(parameter.nbytes for parameter in model.parameters())
        assert opened.bytes_read == kept


def test_a_plan_has_what_each_rank_reads(written: Callable[[str], Written]) -> None:
    """The plan of each rank is of that rank's own tensors, which spread experts have unlike."""
    state = written("experts spread")
    settings = ModelConfig(model=str(state.folder), enable_expert_parallel=True)
    source = ModelSource.find(settings)
    with source.open() as opened:
        plans = plan_ranks(source, opened, 4, 4)
        for plan in plans:
            assert plan.report.ok
            held = state.load(plan.rank, enable_expert_parallel=True)
            assert plan.bytes_read == sum(parameter.nbytes for parameter in held.parameters())
            assert not any(read.quantized for read in plan.reads())


def test_an_update_and_sleep_are_those_of_the_original(written: Callable[[str], Written]) -> None:
    """After it is loaded, a model takes checkpoint tensors in place, and quantizes them again."""
    state = written("per block")
    held = state.load(1)
    with tensor_parallel(rank=1, size=2):
        original = get_model(model_config=ModelConfig(model=str(state.original), **state.settings))
    places = {name: each.data_ptr() for name, each in held.named_parameters()}
    with open_checkpoint(state.original) as stored:
        name = "model.layers.1.self_attn.k_proj.weight"
        changed = {name: stored[name].read() * 3, "model.norm.weight": torch.ones(64)}
        for model in (held, original):
            model.update_weights(changed)
        assert_same(bits(held), bits(original))
        assert {name: each.data_ptr() for name, each in held.named_parameters()} == places
        held.sleep()
        with pytest.raises(ModelNotReadyError):
            held.check_ready()
        held.load_weights(stored)
        original.load_weights(stored)
        assert_same(bits(held), bits(original))


class Renaming(LlamaForCausalLM):
    """It changes what a checkpoint calls and stores."""

    def load_weights(self, weights: Any) -> set[str]:
        pairs = [(n.removeprefix("x."), w.read() + 1) for n, w in weights]
        return super().load_weights(pairs)


class Scaling(LlamaForCausalLM):
    """It changes its weights when it processes them: not as it should."""

    def process_weights_after_loading(self) -> None:
        self.model.norm.weight.mul_(2)


@pytest.fixture
def of_class(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[type[LlamaForCausalLM]], Path]:
    """Return a checkpoint of a class of the user's own."""

    def write(cls: type[LlamaForCausalLM]) -> Path:
        folder = tmp_path / cls.__name__
        shutil.copytree(checkpoint("llama"), folder)
        config = json.loads((folder / "config.json").read_text())
        monkeypatch.setitem(registry.registered.models_by_call, cls.__name__, cls)
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [cls.__name__]}))
        return folder

    return write


def test_what_load_weights_changes_is_not_changed_again(
    of_class: Callable[[type[LlamaForCausalLM]], Path], tmp_path: Path
) -> None:
    """Tensors of a sharded state go to their parameters, past an overridden load_weights."""
    folder = of_class(Renaming)
    shard(ModelConfig(model=str(folder)), 1, tmp_path / "out")
    held, original = (
        get_model(model_config=ModelConfig(model=str(each))) for each in (tmp_path / "out", folder)
    )
    assert_same(bits(held), bits(original))


def test_processing_that_is_not_repeatable_is_refused(
    of_class: Callable[[type[LlamaForCausalLM]], Path], tmp_path: Path
) -> None:
    """A module that changes its weights by processing would change them again; it is named."""
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight changes each time Scal"):
        shard(ModelConfig(model=str(of_class(Scaling))), 1, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_one_rank_is_in_memory_at_a_time(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of a rank is freed before the next one is built, without the garbage collector."""
    models: list[weakref.ref[nn.Module]] = []
    build = ModelSource.build

    def counting(self: ModelSource, *arguments: Any) -> vLLMModule:
        assert [each for each in models if each() is not None] == []
        model = build(self, *arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(ModelSource, "build", counting)
    gc.disable()
    try:
        shard(ModelConfig(model=str(checkpoint("qwen2"))), 2, tmp_path / "out")
    finally:
        gc.enable()
    assert len(models) == 2


def test_other_settings_are_refused_by_name(written: Callable[[str], Written]) -> None:
    """Another dtype, quantization or kind of parallelism would need other files."""
    state = written("per block")
    asked: list[tuple[str, dict[str, Any]]] = [
        ("dtype 'bfloat16', and 'float32'", {"dtype": "float32"}),
        ("quantization .*fp8_per_block.*8, 8.*per_tensor", {"quantization": "fp8"}),
        ("quantization .*and .*'fp8_per_block'", {"quantization": "fp8_per_block"}),
        ("enable_expert_parallel False, and True", {"enable_expert_parallel": True}),
        ("architectures", {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}),
        ("num_key_value_heads 2, and 1", {"hf_overrides": {"num_key_value_heads": 1}}),
        ("head_dim 16, and 8", {"hf_overrides": {"head_dim": 8, "num_attention_heads": 8}}),
        # A wrapped model declares fewer entries, so files of one kind are not the other's.
        ("and None .*hf_overrides or model_impl", {"model_impl": "transformers"}),
    ]
    for message, settings in asked:
        with pytest.raises(UnsupportedModelError, match=message):
            state.load(0, **settings)
    state.load(0, dtype="bfloat16", quantization=BLOCKS)
    full = written("tied, 4 ranks, fewer heads, padding")
    with pytest.raises(UnsupportedModelError, match=r"quantization None, and .*fp8"):
        full.load(0, quantization="fp8")


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_ranks_is_refused(copied: Written, size: int) -> None:
    """The message has both sizes."""
    with pytest.raises(ShardingError, match=f"for 2 tensor-parallel ranks.* built for {size}"):
        copied._replace(size=size).load(0)


def test_experts_that_have_moved_are_not_filled_from_it(
    written: Callable[[str], Written], tmp_path: Path
) -> None:
    """Its files have those of each rank in order; moved back, they are filled."""
    state = written("experts spread")
    more = {"enable_expert_parallel": True, "num_redundant_experts": 1}
    with pytest.raises(UnsupportedModelError, match="leave num_redundant_experts out"):
        state.load(0, **more)
    with pytest.raises(UnsupportedModelError, match="leave num_redundant_experts out"):
        shard(ModelConfig(model=str(state.original), **more), 2, tmp_path / "more")
    model = state.load(1, enable_expert_parallel=True)
    expected = {name: tensor.clone() for name, tensor in bits(model).items()}
    layers: Any = [each for each in model.modules() if isinstance(each, FusedMoE)]
    for layer in layers:
        layer.place_experts([*range(layer.num_experts)][::-1])
    with open_checkpoint(state.folder, load_format="sharded_state") as checkpoint:
        with pytest.raises(ShardingError, match="experts of each rank in order"):
            load_from(model, checkpoint)
        for layer in layers:
            layer.place_experts(None)
        load_from(model, checkpoint)
    assert_same(bits(model), expected)


def test_files_that_are_not_those_that_were_written_are_refused(copied: Written) -> None:
    """A file that is missing, cut off, changed or another rank's is named."""
    path = copied.folder / "model-rank-1-part-1.safetensors"
    data = path.read_bytes()
    swapped = (copied.folder / "model-rank-0-part-1.safetensors").read_bytes()
    assert len(swapped) == len(data)
    flipped = bytes([*data[:-1], data[-1] ^ 1])
    for forged, message in [
        (data[:-1], f"should have {len(data)} bytes"),
        (data + b"\0", f"should have {len(data)} bytes"),
        (flipped, "fingerprint"),
        (data.replace(b"F8_E4M3", b"F8_E5M2"), "fingerprint"),
        (swapped, "fingerprint"),
    ]:
        path.write_bytes(forged)
        with pytest.raises(CheckpointFormatError, match=rf"rank-1-part-1.*{message}"):
            copied.load(1)
        copied.load(0)  # another rank's files are not read
    path.unlink()
    with pytest.raises(CheckpointFormatError, match=r"rank-1-part-1.*is not there.*for rank 1"):
        copied.load(1)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda m: m.update(format_version=2), "format_version should be 1"),
    "bool version": (lambda m: m.update(format_version=True), "format_version should be 1"),
    "no version": (lambda m: m.pop("format_version"), "format_version should be 1"),
    "unknown": (lambda m: m.update(extra=1), "damaged.*extra"),
    "dtype": (lambda m: m.update(dtype="int8"), "damaged.*dtype"),
    "ranks": (lambda m: m["ranks"].pop(), "files of 2 ranks, and lists those of 1"),
    "no files": (lambda m: m["ranks"].__setitem__(1, []), "files of 2 ranks"),
    "size": (lambda m: m["ranks"][0][0].update(size=-1), "damaged.*size"),
    "path": (lambda m: m["ranks"][0][0].update(file="../x"), "damaged.*file"),
    "lying size": (lambda m: m["ranks"][0][0].update(size=8), "should have 8 bytes"),
    "fingerprint": (lambda m: m["ranks"][0][0].update(fingerprint="ab"), "damaged"),
    "fewer parts": (lambda m: m["ranks"][0].pop(), "missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_refused(copied: Written, damage: str) -> None:
    """Each entry is checked; nothing of it is a path."""
    change, message = DAMAGE[damage]
    path = copied.folder / "sharded_state.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    error = MissingWeightError if message == "missing" else CheckpointFormatError
    with pytest.raises(error, match=rf"(?s){message}"):
        copied.load(0)


def test_a_manifest_that_is_no_object_or_not_there_is_refused(copied: Written) -> None:
    """Without it, the files are no checkpoint; what is asked for by name has to be there."""
    path = copied.folder / "sharded_state.json"
    for text in ("", "[]", "{", '{"format_version": 1, "format_version": 1}'):
        path.write_text(text)
        with pytest.raises(CheckpointFormatError, match=r"sharded_state\.json"):
            copied.load(0)
    path.unlink()
    config = ModelConfig(model=str(copied.folder))
    with pytest.raises(CheckpointFormatError, match=r"sharded_state\.json is not there"):
        get_model(model_config=config, load_config=LoadConfig(load_format="sharded_state"))


def test_files_of_ranks_are_no_ordinary_checkpoint(
    written: Callable[[str], Written], tmp_path: Path
) -> None:
    """Without the manifest, tensors in another order could pass for those of a checkpoint."""
    shutil.copytree(written("tied, 1 rank").folder, tmp_path / "copy")
    config = ModelConfig(model=str(tmp_path / "copy"))
    said = {"safetensors": "but of 'sharded_state'", "auto": r"holds no .*\*\.safetensors"}
    for load_format, message in said.items():
        with pytest.raises(CheckpointFormatError, match=message):
            get_model(model_config=config, load_config=LoadConfig(load_format=load_format))
        (tmp_path / "copy/sharded_state.json").unlink(missing_ok=True)


def test_a_checkpoint_that_is_quantized_keeps_its_own_settings(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Where config.json says how weights are quantized, the manifest leaves it to that."""
    original = ModelConfig(model=str(checkpoint("llama")), quantization="fp8_per_channel")
    convert(original, tmp_path / "quantized")
    quantized = ModelConfig(model=str(tmp_path / "quantized"))
    manifest = shard(quantized, 2, tmp_path / "out")
    assert manifest.quantization == "config.json"

    def both(rank: int) -> tuple[vLLMModule, vLLMModule]:
        held = ModelConfig(model=str(tmp_path / "out"), quantization="compressed-tensors")
        progress = LoadConfig(show_progress=True)
        return get_model(model_config=held, load_config=progress), get_model(model_config=quantized)

    for held, wanted in run_ranks(2, both):
        assert_same(bits(held), bits(wanted))
    with pytest.raises(UnsupportedModelError, match="is quantized already"):
        get_model(model_config=ModelConfig(model=str(tmp_path / "out"), quantization="fp8"))


def test_an_engine_wakes_from_it(written: Callable[[str], Written]) -> None:
    """An engine that slept loads what its rank holds again."""
    state = written("tied, 1 rank")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20}
    prompt, greedy = [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0, max_tokens=4)
    with LLM(str(state.folder), device="cpu", **options) as llm:
        first = llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids
        llm.sleep()
        llm.wake_up()
        assert llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids == first


def test_a_model_that_does_not_fit_is_refused_in_one_report(copied: Written) -> None:
    """Paths, shapes and dtypes are compared with what the rank holds, and nothing is written."""
    path = copied.folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(MissingWeightError, match=r"model\.layers\.2\.mlp\.down_proj\.weight_scale"):
        copied.load(0)
    path.write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(UnexpectedWeightError, match=r"model\.layers\.1\.mlp.*no parameter or buf"):
        copied.load(0)
    wider = {"intermediate_size": 160}
    path.write_text(json.dumps(config | wider))
    with pytest.raises(UnsupportedModelError, match="with intermediate_size 96, and 160 was asked"):
        copied.load(0)
    manifest = json.loads((copied.folder / "sharded_state.json").read_text())
    manifest["config"] |= wider
    (copied.folder / "sharded_state.json").write_text(json.dumps(manifest))
    with pytest.raises(MisshapenWeightError, match=r"this rank holds .*\[160, 64\], got .*\[96, 6"):
        copied.load(0)


def test_a_broken_or_refused_write_leaves_nothing(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder appears whole or not at all, and nothing that is there is overwritten."""
    config = ModelConfig(model=str(checkpoint("qwen2")))

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sharded_state, "write_json", broken)
        with pytest.raises(KeyboardInterrupt):
            shard(config, 2, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ShardingError):
        shard(config, 3, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(ValueError, match="no empty folder"):
        shard(config, 2, tmp_path / "out")

    def in_between(rank: int, nbytes: int) -> None:
        (tmp_path / "late").mkdir(exist_ok=True)
        (tmp_path / "late/mine").touch()

    with pytest.raises(ValueError, match="no empty folder"):
        shard(config, 1, tmp_path / "late", on_rank=in_between)
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "late", "mine"}


def test_a_sharded_state_is_not_sharded_again(
    written: Callable[[str], Written], tmp_path: Path
) -> None:
    """What ranks hold is no checkpoint to cut."""
    folder = written("per block").folder
    with pytest.raises(UnsupportedModelError, match="is a sharded state already"):
        shard(ModelConfig(model=str(folder)), 2, tmp_path / "out")


def test_the_commands_write_and_read_it(
    checkpoint: Callable[..., Path], run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """shard, plan, load and inspect work on the command line; a folder in use is wrong usage."""
    out = tmp_path / "new/out"
    code, text, error = run(
        "shard", checkpoint("qwen3-moe"), "--tp", 2, "--quantization", "fp8", "--out", out, "--json"
    )
    assert code == 0, error
    reported = json.loads(text)
    assert [each["files"] for each in reported["ranks"]] == [
        [f"model-rank-{rank}-part-0.safetensors"] for rank in (0, 1)
    ]
    assert reported["quantization"] == {"scheme": "fp8_per_tensor"}
    assert (out / "tokenizer.json").exists()
    assert (out.stat().st_mode & 0o777) == (tmp_path / "new").stat().st_mode & 0o777
    for command in ("load", "plan"):
        code, text, error = run(command, out, "--tp", 2, "--json")
        assert code == 0, error
        read = [each["bytes_read"] for each in json.loads(text)["ranks"]]
        assert read == [each["bytes"] for each in reported["ranks"]]
    trace = tmp_path / "trace.json"
    assert run("load", out, "--tp", 2, "--trace", trace)[0] == 0
    assert "read" in trace.read_text()
    assert "its own" in run("plan", out, "--tp", 2)[1]
    code, text, _ = run("inspect", out)
    assert (code, "total of rank 0 of 2: " in text) == (0, True)
    assert json.loads(run("inspect", out, "--json")[1])["ranks"] == 2
    code, _, error = run("load", out)
    assert code == 1
    assert "sharded for 2" in error
    code, _, error = run("shard", checkpoint("qwen3-moe"), "--out", out)
    assert code == 2
    assert "no empty folder" in error


def test_a_rank_opens_its_own_files_alone(copied: Written) -> None:
    """Another rank's file may be on another machine only."""
    (copied.folder / "model-rank-0-part-0.safetensors").unlink()
    copied.load(1)
    with pytest.raises(CheckpointFormatError, match="lists it for rank 0"):
        copied.load(0)


def test_the_files_are_closed(written: Callable[[str], Written]) -> None:
    """Closing a sharded state closes the files of every rank that was asked for."""
    opened = open_checkpoint(written("per block").folder)
    assert isinstance(opened, Checkpoint)
    with opened:
        handle = opened["model.norm.weight"]
    with pytest.raises(ValueError, match="closed"):
        handle.read()


def test_heads_that_shapes_do_not_tell_apart_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Copies of one key-value head have the shape of two heads that are cut, and other values."""
    original = checkpoint("llama")
    for given in ({"num_key_value_heads": 1}, {"stored_rotary_pairs": True}):
        written_from = read_config(original, ModelConfig(model="", hf_overrides=given))
        manifest = Manifest(
            format_version=1, library_version="0", architectures=["LlamaForCausalLM"],
            tensor_parallel_size=2, enable_expert_parallel=False, dtype="float32",
            config=cutting_entries(written_from),
            quantization=None, ranks=[[], []],
        )  # fmt: skip
        asked = ModelConfig(model="")
        with pytest.raises(UnsupportedModelError, match=f"with {next(iter(given))} "):
            manifest.settle(asked, read_config(original, asked))


def test_a_manifest_with_an_unknown_scheme_is_refused_by_its_path(copied: Written) -> None:
    """The path of the manifest is in the message."""
    path = copied.folder / "sharded_state.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps(entries | {"quantization": {"scheme": "nonsense"}}))
    with pytest.raises(CheckpointFormatError, match=r"sharded_state\.json is damaged.*nonsense"):
        copied.load(0)

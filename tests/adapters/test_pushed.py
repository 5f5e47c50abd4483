"""A trainer pushes an adapter into an engine: by its transfers, in place, and nothing else."""

from __future__ import annotations

import json
import runpy
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.base import shared_memory
from vllm_module.errors import RankError, UnsupportedModelError, WeightLoadError, WeightReadError
from vllm_module.weights import init_weight_transfer, receive_weights, send_weights

HERE = Path(__file__).parent
SUPPORT = runpy.run_path(str(HERE / "support.py"))
adapt, small_model = SUPPORT["adapt"], SUPPORT["small_model"]
free_port = runpy.run_path(str(HERE.parent / "support.py"))["free_port"]
SIX = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPT = [(7 * i + 3) % 60 for i in range(20)]
STEPS = 3
SETTINGS = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "r": 3}
FILE = "adapter_model.safetensors"
# Of what transformers has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, and the adapter after each step of a training."""
    path = tmp_path_factory.mktemp("pushed")
    small_model("llama", path / "base")
    for step in range(STEPS + 1):
        model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
        adapt(model, path / str(step), step, lora_alpha=16, **SETTINGS)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Return the tokens that transformers and PEFT generate after each step."""
    found = []
    for step in range(STEPS + 1):
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        model: Any = PeftModel.from_pretrained(base, folder / str(step)).eval()
        ids = list(PROMPT)
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(PROMPT) :])
    assert len({*map(tuple, found)}) == STEPS + 1
    return found


@pytest.fixture(
    scope="module",
    params=[{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["one rank", "two ranks", "two stages"],
)
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings = {"kv_cache_memory_bytes": 1 << 20, "dtype": "float32", **request.param}
    with LLM(str(folder / "base"), **settings) as llm:
        yield llm


@pytest.fixture
def loaded(llm: LLM, folder: Path) -> Iterator[LLM]:
    llm.load_adapter("a", folder / "0")
    yield llm
    llm.unload_adapter("a")


class Sent:
    """The bytes that this process sends or receives, by group: of tensors, and of what is said."""

    def __init__(self) -> None:
        self.tensors, self.said = Counter[str](), Counter[str]()

    def total(self) -> int:
        return self.tensors.total() + self.said.total()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    found, broadcast, gather = Sent(), dist.broadcast, dist.all_gather

    def counted_broadcast(tensor: Any, *rest: Any, group: Any = None, **more: Any) -> Any:
        found.tensors[group.group_name] += tensor.nbytes
        return broadcast(tensor, *rest, group=group, **more)

    def counted_gather(parts: Any, tensor: Any, group: Any = None, **more: Any) -> Any:
        found.said[group.group_name] += sum(each.nbytes for each in parts)
        return gather(parts, tensor, group=group, **more)

    # Each memory is of another host, so that tensors are sent.
    monkeypatch.setattr(shared_memory, "host_name", lambda: secrets.token_hex(8))
    monkeypatch.setattr(dist, "broadcast", counted_broadcast)
    monkeypatch.setattr(dist, "all_gather", counted_gather)
    return found


def answer(llm: LLM) -> tuple[list[int], list[tuple[str, int]]]:
    (output,) = llm.generate([PROMPT], SIX, use_tqdm=False, lora_request="a")
    return list(output.outputs[0].token_ids), output.outputs[0].weight_versions


def test_pushed_each_step(loaded: LLM, folder: Path, expected: list[list[int]], sent: Sent) -> None:
    """Tokens are PEFT's after each push; each rank is sent the bytes of A and B, and no others."""
    port = free_port()
    steps = [load_file(folder / str(step) / FILE) for step in range(STEPS + 1)]
    size = sum(each.nbytes for each in steps[0].values())
    names: list[str] = []

    def train() -> None:
        group = init_weight_transfer("127.0.0.1", port, 0, 2)
        names.append(group.group_name)
        for step in range(1, STEPS + 1):
            send_weights(steps[step], group=group, bucket_bytes=2048)

    trainer = threading.Thread(target=train)
    trainer.start()
    group = init_weight_transfer("127.0.0.1", port, 1, 2)
    number = loaded.list_adapters()[0].number
    memory = loaded.executor.worker.call_with_adapter(number, addresses)
    assert answer(loaded) == (expected[0], [("0/a@0", 6)])
    for step in range(1, STEPS + 1):
        sent.tensors.clear()
        sent.said.clear()
        with receive_weights(src=0, group=group) as weights:
            loaded.update_adapter("a", weights)
        pushed, said = Counter(sent.tensors), sent.said.total()
        assert answer(loaded) == (expected[step], [(f"0/a@{step}", 6)])
        # The trainer is a thread here, so what it sends is counted at both ends.
        assert pushed.pop(group.group_name) + pushed.pop(names[0], 0) == 2 * size
        assert said < 16 << 10, "names, shapes and states"
        if loaded.executor.size > 1:  # and two messages, each of one frame
            assert pushed.total() == size + 2 * loaded.executor._ranks._frame.nbytes
    trainer.join()
    assert loaded.executor.worker.call_with_adapter(number, addresses) == memory


def addresses(adapter: Any) -> dict[str, int]:
    return {path: each.data_ptr() for path, each in adapter.named_parameters()}


def test_no_more_than_is_named(
    loaded: LLM, folder: Path, expected: list[list[int]], sent: Sent
) -> None:
    """Of views of a large tensor, as a trainer has, only what they show is sent; some may be."""
    new = load_file(folder / "1" / FILE)
    large = torch.zeros(1 << 20)
    views, start = {}, 0
    for name, each in new.items():
        views[name] = large[start : start + each.numel()].view(each.shape).copy_(each)
        start += each.numel()
    loaded.update_adapter("a", views)
    assert answer(loaded) == (expected[1], [("0/a@1", 6)])
    assert sent.total() < 1 << 20 < large.nbytes
    old = load_file(folder / "0" / FILE)
    for part in (0, 1):
        loaded.update_adapter("a", [pair for at, pair in enumerate(old.items()) if at % 2 == part])
    assert answer(loaded) == (expected[0], [("0/a@3", 6)])


def test_files(loaded: LLM, folder: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    """A folder is taken in place too; one with other settings, or a NaN, changes nothing."""
    loaded.update_adapter("a", str(folder / "2"))
    assert answer(loaded) == (expected[2], [("0/a@1", 6)])
    shutil.copytree(folder / "1", tmp_path / "alpha")
    config = json.loads((tmp_path / "alpha/adapter_config.json").read_text())
    (tmp_path / "alpha/adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    with pytest.raises(UnsupportedModelError, match=r"lora_alpha 8\.0 for 16\.0.*: unload"):
        loaded.update_adapter("a", tmp_path / "alpha")
    shutil.copytree(folder / "1", tmp_path / "nan")
    tensors = load_file(tmp_path / "nan" / FILE)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, tmp_path / "nan" / FILE)
    with pytest.raises((WeightReadError, RankError), match="NaN"):
        loaded.update_adapter("a", tmp_path / "nan")
    with pytest.raises(WeightLoadError, match="adapter_config"):
        loaded.update_adapter("a", tmp_path)
    assert answer(loaded) == (expected[2], [("0/a@1", 6)])


def test_what_is_wrong(loaded: LLM, folder: Path, expected: list[list[int]]) -> None:
    """Nothing changes, and the next push is taken."""
    new = load_file(folder / "3" / FILE)
    name, tensor = next(iter(new.items()))

    def stops() -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor
        raise OSError("the trainer has ended")

    def no_tensors() -> Iterator[tuple[str, Any]]:
        yield name, "a text"

    for wrong, error, why in (
        (stops(), OSError, "the trainer has ended"),
        ([*new.items(), (name, tensor)], WeightLoadError, "comes twice"),
        (no_tensors(), TypeError, "got .* and str"),
        (5, ValueError, "weights should be"),
    ):
        with pytest.raises(error, match=why):
            loaded.update_adapter("a", wrong)
    with pytest.raises(ValueError, match="no adapter is called 'b'"):
        loaded.update_adapter("b", stops())
    assert answer(loaded) == (expected[0], [("0/a@0", 6)])
    loaded.update_adapter("a", new)
    assert answer(loaded) == (expected[3], [("0/a@1", 6)])

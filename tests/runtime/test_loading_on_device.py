"""Weights that are loaded, updated, put to sleep and woken up on a simulated device.

Reading threads are one, the caller's: modes belong to a thread. ``tests/weights/test_staging.py``
has what several threads and streams do.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_module import LLM
from vllm_module.parameters import BasevLLMParameter
from vllm_module.runtime.ranks import worker, worker_weights
from vllm_module.weights import staging

TESTS = Path(__file__).parents[1]
engines = SimpleNamespace(**runpy.run_path(str(TESTS / "runtime" / "engines_on_device.py")))
folders, GREEDY = engines.folders, engines.GREEDY
SMALL = {
    "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4, "dtype": "float32",
    "max_num_batched_tokens": 16, "block_size": 4, "enforce_eager": True,
}  # fmt: skip
PACKED = ["gptq", "gptq-act-order", "awq"]
STEPS = ["update", "sleep 1", "sleep 2"]


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that publishes a checkpoint of packed weights."""
    made = runpy.run_path(str(TESTS / "quantization" / "test_packed_checkpoints.py"))

    def folder(name: str) -> Path:
        path: Path = tmp_path_factory.mktemp(name)
        config, make, quantization = made["CHECKPOINTS"][name]
        made["packing"].publish(path, config, make, quantization)
        return path

    return folder


@pytest.mark.parametrize("name", PACKED)
def test_packed_checkpoints_load_on_the_device(packed_folder: Any, name: str) -> None:
    """GPTQ's, AWQ's and other words are converted there, and give a CPU's tokens."""
    folder = packed_folder(name)
    expected = engines.generated(folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20)
    with engines.on_device() as device:
        assert engines.generated(folder, GREEDY, device="cuda", enforce_eager=True) == expected
        assert_staged(device)


def test_nf4_checkpoints_load_on_the_device(tmp_path: Path) -> None:
    """Those of bitsandbytes do, with scales that are quantized themselves."""
    bnb = runpy.run_path(str(TESTS / "quantization" / "bnb_checkpoints.py"))
    folder = bnb["publish"](tmp_path / "stored", "llama", "nf4-nested").folder
    expected = engines.generated(folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20)
    with engines.on_device() as device:
        assert engines.generated(folder, GREEDY, device="cuda", enforce_eager=True) == expected
        assert_staged(device)


def assert_staged(device: Any) -> None:
    """Check that no weight was copied to the device in a way that waits.

    The runner's own first inputs are smaller than a weight.
    """
    slow = [nbytes for nbytes, pinned in device.copies if not pinned and nbytes > 512]
    assert slow == [], "copies to the device wait"


class Watch:
    """Checks after each step that weights are on the device, and after updates, where they were."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[int]] = {}

    def __call__(self, llm: Any, step: str) -> None:
        (held,) = llm.apply_model(lambda model: list(model.parameters()))
        assert {each.device.type for each in held} == {"cuda"}, "weights are on the host"
        here = [each.data_ptr() for each in held]
        assert self.addresses.setdefault(step, here) == here, "weights have moved"


def lived(folder: Path, steps: list[str], check: Any = None, **options: Any) -> list[Any]:
    """Return the tokens of an engine after each of some changes of its weights."""
    changed = {
        name: weight * (1.5 if "mlp" in name else 1.0)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    prompts = [{"prompt_token_ids": prompt} for prompt in engines.PROMPTS]
    found = []
    with LLM(folder, **SMALL, **options) as llm:
        for step in steps:
            if step == "update":
                llm.update_weights({n: x for n, x in changed.items() if "layers.1." in n})
            elif step == "sleep 1":
                llm.sleep(1)
                llm.wake_up()
            else:
                llm.sleep(2)
                llm.update_weights(changed)
            if check is not None:
                check(llm, step)
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            found.append([each.outputs[0].token_ids for each in outputs])
    return found


@pytest.mark.parametrize("quantization", [None, "fp8_per_channel"])
def test_weights_change_on_the_device(folders: Any, quantization: str | None) -> None:
    """Updates, and sleep at both levels, give a CPU's tokens; an update keeps the storage."""
    folder = folders("wide")
    options = {} if quantization is None else {"quantization": quantization}
    memory = {"kv_cache_memory_bytes": 1 << 20}
    expected = lived(folder, STEPS, device="cpu", **memory, **options)
    with engines.on_device() as device:
        found = lived(folder, ["update", *STEPS], Watch(), device="cuda", **memory, **options)
        assert_staged(device)
    assert found[1:] == expected


def unpinned(patch: pytest.MonkeyPatch) -> None:
    def empty(self: Any, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    patch.setattr(staging.CudaDevice, "pinned", empty)


def waiting(patch: pytest.MonkeyPatch) -> None:
    copy = staging.copy_weight
    patch.setattr(staging, "copy_weight", lambda *given, non_blocking: copy(*given))


def parameters_of_host(patch: pytest.MonkeyPatch) -> None:
    materialize = BasevLLMParameter.materialize_on
    patch.setattr(
        BasevLLMParameter, "materialize_on", lambda self, device: materialize(self, "cpu")
    )


def awake_on_host(patch: pytest.MonkeyPatch) -> None:
    load = worker_weights.load_held

    def faulty(model: Any, held: Any) -> None:
        load(model, held)
        norm = model.model.norm
        norm._parameters["weight"] = torch.nn.Parameter(norm.weight.memory.clone(), False)

    patch.setattr(worker_weights, "load_held", faulty)


def new_storage(patch: pytest.MonkeyPatch) -> None:
    update = worker.Worker.update_weights

    def faulty(self: Any, *given: Any, **others: Any) -> Any:
        result = update(self, *given, **others)
        norm = self.model.model.norm
        norm._parameters["weight"] = torch.nn.Parameter(norm.weight.clone(), False)
        return result

    patch.setattr(worker.Worker, "update_weights", faulty)


FAULTS: dict[str, tuple[Any, str]] = {
    "staged in memory that is not pinned": (unpinned, "copies to the device wait"),
    "copies that wait": (waiting, "copies to the device wait"),
    "parameters on the host": (parameters_of_host, "of the device and of the host|on the host"),
    "weights that wake up on the host": (awake_on_host, "weights are on the host|weight is on cpu"),
    "an update that moves a weight": (new_storage, "weights have moved"),
}


def staged(device: Any, folder: Path, steps: list[str], watch: Watch) -> None:
    lived(folder, steps, watch, device="cuda")
    assert_staged(device)


@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(folders: Any, plant: Any, message: str) -> None:
    """A load, an update or a wake-up that uses the host or other memory is seen."""
    folder, watch = folders("qwen3"), Watch()
    with engines.on_device() as device, pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(Exception, match=message):  # what fails is not of one kind
            staged(device, folder, ["update", "update", "sleep 1"], watch)

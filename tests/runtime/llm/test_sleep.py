"""Engines that sleep, and with which weights they wake up."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import LLM, WeightLoadError
from vllm_module.errors import ModelNotReadyError
from vllm_module.runtime.ranks import worker_weights as workers

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
SMALL, greedy, first_tokens = (ASKING[name] for name in ("SMALL", "greedy", "first_tokens"))


def test_sleep_and_wake_up(folder: Path) -> None:
    """A sleeping engine has no weights and refuses requests; awake, it is as before."""
    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        stream = llm.stream("dog", greedy(8))
        next(stream)
        with pytest.raises(RuntimeError, match="1 requests are going on"):
            llm.sleep()
        stream.close()
        for level in (0, 3, True, "1"):
            with pytest.raises(ValueError, match="level should be 1 or 2"):
                llm.sleep(level)
        llm.sleep(level=2)
        llm.sleep(level=2)  # again: nothing changes
        with pytest.raises(RuntimeError, match="sleeps already"):
            llm.sleep(level=1)  # whose weights would be there
        model = llm.executor.worker.model
        assert all(parameter.is_meta for parameter in model.parameters())
        with pytest.raises(ModelNotReadyError):
            model(torch.tensor([1]), torch.tensor([0]))
        with pytest.raises(ModelNotReadyError, match="sleeps"):
            llm.generate("fox", greedy(5), False)
        llm.wake_up()
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("size", [1, 2])
def test_it_wakes_up_with_the_weights_that_slept(folder: Path, theirs: Any, size: int) -> None:
    """Updates are kept at level 1; at level 2 they must be sent, or the loss must be asked for."""
    state = theirs.state_dict()
    new = state | {"lm_head.weight": state["lm_head.weight"].flip(0).contiguous()}
    with LLM(folder, tensor_parallel_size=size, **SMALL) as llm:
        first = first_tokens(llm)
        llm.sleep(level=2)
        llm.wake_up()  # nothing was updated, so the folder has them
        assert first_tokens(llm) == first
        llm.update_weights({"lm_head.weight": new["lm_head.weight"]})
        updated = first_tokens(llm)
        assert updated[0] == 129 - first[0]
        llm.sleep()
        llm.wake_up()
        llm.wake_up()  # it is awake
        assert first_tokens(llm) == updated
        llm.sleep(level=2)
        with pytest.raises(ModelNotReadyError, match=r"update_weights .*or reload_weights\(\)"):
            llm.wake_up()
        with pytest.raises(WeightLoadError, match="missing"):  # a part is not enough
            llm.update_weights({"lm_head.weight": new["lm_head.weight"]})
        with pytest.raises(ModelNotReadyError):
            first_tokens(llm)
        llm.update_weights(new)
        assert first_tokens(llm) == updated
        llm.sleep(level=2)
        llm.reload_weights()
        assert first_tokens(llm) == first


def test_a_folder_that_changed_does_not_wake_it_up(folder: Path, tmp_path: Path) -> None:
    """What slept at level 2 is not replaced by what was saved to the folder since."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    with LLM(copy, **SMALL) as llm:
        tensors = load_file(copy / "model.safetensors")
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
        save_file(tensors, copy / "new", {"format": "pt"})
        (copy / "new").replace(copy / "model.safetensors")
        first = first_tokens(llm)
        llm.sleep(level=2)
        with pytest.raises(ModelNotReadyError, match="have changed since"):
            llm.wake_up()
        llm.reload_weights()
        assert first_tokens(llm)[0] == 129 - first[0]


def test_weights_of_a_device_sleep_in_host_memory(
    folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come back with their updates, also after a sleep for which there was no room."""
    head = theirs.lm_head.weight.detach().flip(0).contiguous()

    def no_room(nbytes: int, ranks: int) -> None:
        raise MemoryError

    with LLM(folder, **SMALL) as llm:
        llm.update_weights({"lm_head.weight": head})
        updated = first_tokens(llm)
        model = llm.executor.worker.model
        with monkeypatch.context() as patch:
            patch.setattr(llm.executor.worker, "device", torch.device("cuda"))
            patch.setattr(workers, "_check_host_memory", no_room)
            with pytest.raises(MemoryError):
                llm.sleep()
        assert first_tokens(llm) == updated
        with monkeypatch.context() as patch:
            patch.setattr(llm.executor.worker, "device", torch.device("cuda"))
            llm.sleep()
        assert all(parameter.is_meta for parameter in model.parameters())
        llm.wake_up()
        assert first_tokens(llm) == updated


def test_what_does_not_fit_into_host_memory_is_named() -> None:
    """The sizes of all ranks, what is available, and the level that needs nothing."""
    workers._check_host_memory(1 << 10, 2)
    with pytest.raises(MemoryError, match=r"2 ranks take 1048576\.0 GiB .* sleep\(level=2\) drops"):
        workers._check_host_memory(1 << 49, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_host_memory_is_for_all_ranks(ranks: int) -> None:
    """What fits once, and not for each rank, is refused; sizes are far from what is there."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = (int(each.split()[1]) << 10 for each in lines if "MemAvailable" in each)
    workers._check_host_memory(available // (2 * ranks), ranks)
    with pytest.raises(MemoryError, match=f"weights of {ranks} ranks"):
        workers._check_host_memory(2 * available // ranks, ranks)

"""All ranks of an engine have the same weights, or run no step."""

from __future__ import annotations

import runpy
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.errors import ModelNotReadyError, RankError, UnexpectedWeightError
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.testing import write_checkpoint

# Pytest's importlib mode has no imports between test files.
RANKS: Any = runpy.run_path(str(Path(__file__).with_name("running.py")))
Weights, CONFIG, weights = (RANKS[name] for name in ("Weights", "CONFIG", "weights"))
executor, logits = (RANKS[name] for name in ("executor", "logits"))


@pytest.mark.parametrize("source", [dict, lambda pairs: iter(pairs.items())])
def test_an_update_reaches_all_ranks(
    shared: Executor, folder: Path, tmp_path: Path, source: Callable[[Weights], Any]
) -> None:
    """After an update, of all weights or some, logits equal those of a fresh load."""
    before, new = logits(shared), weights(1)
    shared.update_weights(source(new))
    fresh = executor(write_checkpoint(tmp_path, new, config=CONFIG.to_dict()), 1)
    fresh.start(256)
    torch.testing.assert_close(logits(shared), logits(fresh), rtol=0, atol=1e-4)
    part = {name: tensor for name, tensor in new.items() if "layers.1" in name}
    old = {name: tensor for name, tensor in weights(0).items() if name not in part}
    shared.update_weights(source(old))
    assert not torch.allclose(logits(shared), before, atol=1e-2)
    shared.update_weights(source({name: weights(0)[name] for name in part}))
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_an_update_that_is_refused_is_made_up_for_by_a_whole_checkpoint(shared: Executor) -> None:
    """Each step raises the reason until an update has all weights; the ranks keep running."""
    before = logits(shared)
    wrong = {**weights(1), "model.other.weight": torch.ones(2)}
    with pytest.raises(UnexpectedWeightError, match=r"model\.other\.weight"):
        shared.update_weights(iter(wrong.items()))
    with pytest.raises(ModelNotReadyError, match="broke on UnexpectedWeightError"):
        logits(shared)
    name = "model.norm.weight"
    with pytest.raises(ValueError, match="missing"):
        shared.update_weights({name: weights(0)[name]})
    with pytest.raises(ModelNotReadyError):
        logits(shared)
    shared.update_weights(weights(0))
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_an_update_that_another_rank_refuses_says_which(
    shared: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank refuses, the update raises, and no step runs on the mixture of weights."""

    def take(weights: Iterator[Any], whole: bool) -> None:
        deque(weights, maxlen=0)

    with monkeypatch.context() as patch:
        patch.setattr(shared.worker, "update_weights", take)
        wrong = {"model.norm.weight": torch.ones(48), "other": torch.ones(2)}
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: UnexpectedWeightError"):
            shared.update_weights(iter(wrong.items()))
    with pytest.raises(ModelNotReadyError, match="broke on UnexpectedWeightError"):
        logits(shared)
    shared.update_weights(weights(0))
    logits(shared)


def test_an_update_that_one_rank_took_and_another_refused_is_a_mixture(
    shared: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step runs although no rank's own weights are broken."""

    def take(weights: Iterator[Any], whole: bool) -> None:
        deque(weights, maxlen=0)
        shared.worker._took_update = True

    with monkeypatch.context() as patch:
        patch.setattr(shared.worker, "update_weights", take)
        with pytest.raises(RankError, match="rank 1 of 2 failed"):
            shared.update_weights(iter({"other": torch.ones(2)}.items()))
    with pytest.raises(ModelNotReadyError, match="some ranks took an update"):
        logits(shared)
    shared.update_weights(weights(0))
    logits(shared)


def test_a_source_that_breaks_before_anything_came_changes_nothing(shared: Executor) -> None:
    """The error is raised, and the ranks run with the weights that they have."""
    before = logits(shared)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("no trainer")
        yield

    with pytest.raises(OSError, match="no trainer"):
        shared.update_weights(broken())
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_all_ranks_sleep_and_wake_up(shared: Executor) -> None:
    """They wake up with the weights that slept, and reload the checkpoint's."""
    before = logits(shared)
    shared.update_weights(weights(1))
    updated = logits(shared)
    shared.sleep()
    shared.wake_up()
    torch.testing.assert_close(logits(shared), updated, rtol=0, atol=0)
    shared.sleep(level=2)
    assert all(parameter.is_meta for parameter in shared.worker.model.parameters())
    with pytest.raises(ModelNotReadyError, match="updates had changed them"):
        shared.wake_up()
    shared.reload_weights()
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_a_rank_that_cannot_wake_up_says_why(shared: Executor, folder: Path) -> None:
    """An error outside of steps is raised, and the call can be repeated."""
    before = logits(shared)
    shared.reload_weights()
    shared.sleep(level=2)
    config = folder / "model.safetensors"
    hidden = config.rename(folder / "hidden")
    with pytest.raises(ValueError, match="safetensors"):
        shared.wake_up()
    hidden.rename(config)
    shared.wake_up()
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)

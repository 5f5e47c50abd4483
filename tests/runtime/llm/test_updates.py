"""New weights in an engine that serves."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module import LLM, WeightLoadError
from vllm_module.errors import ModelNotReadyError, WeightReadError
from vllm_module.weights import open_checkpoint

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
SMALL, greedy = (ASKING[name] for name in ("SMALL", "greedy"))


def test_weights_take_effect_between_steps(folder: Path, theirs: Any) -> None:
    """An update changes the next tokens, and pages cached before it are not reused."""
    with LLM(folder, **SMALL) as llm:
        long = {"prompt_token_ids": [5, 6] * 20}
        before = llm.generate(long, greedy(8), False)[0].outputs[0].token_ids
        head = theirs.lm_head.weight.detach().flip(0).contiguous()
        stream = llm.stream("fox", greedy(8, ignore_eos=True))
        next(stream)
        llm.update_weights({"lm_head.weight": head})
        assert len(list(stream)) == 7  # running requests continue
        after = llm.generate(long, greedy(8), False)[0].outputs[0].token_ids
        assert after[0] == 129 - before[0]
        llm.update_weights({"lm_head.weight": theirs.lm_head.weight.detach()})
        assert llm.generate(long, greedy(8), False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_an_update_that_is_refused_costs_nothing(
    folder: Path, theirs: Any, tmp_path: Path, ranks: dict[str, int]
) -> None:
    """Requests go on with the weights that they had, and so does a later update of a part."""
    head = theirs.lm_head.weight.detach()
    nan = head.clone()
    nan[3, 2] = torch.nan

    def stream_of_one() -> Any:
        yield "model.norm.bias", head

    norm = theirs.model.norm.weight.detach() * torch.nan
    save_file({"lm_head.weight": head, "model.norm.weight": norm}, tmp_path / "model.safetensors")

    with (
        LLM(folder, **ranks, **SMALL) as llm,
        open_checkpoint(tmp_path) as files,
    ):
        before = llm.generate("fox", greedy(8, ignore_eos=True), False)[0].outputs[0].token_ids
        stream = llm.stream("fox", greedy(8, ignore_eos=True))
        next(stream)
        for refused, why in (
            ({"lm_head.weight": torch.zeros(3, 3)}, "expected shape"),
            ({"lm_head.weight": head, "lm_heads.weight": head}, "lm_heads"),
            # A stage has written nothing of a stream that another one refuses, but cannot know it.
            *([] if "pipeline_parallel_size" in ranks else [(stream_of_one(), "model.norm.bias")]),
            ({"lm_head.weight": nan}, "lm_head.weight has a NaN"),
            (files, "model.norm.weight has a NaN"),
        ):
            with pytest.raises(WeightLoadError, match=why):
                llm.update_weights(refused)
        assert list(stream)[-1].outputs[0].token_ids == before
        llm.update_weights({"lm_head.weight": head.flip(0).contiguous()})  # a part is enough
        after = llm.generate("fox", greedy(8), False)[0].outputs[0].token_ids
        assert after[0] == 129 - before[0]


def test_a_failed_update_ends_and_refuses_requests(folder: Path, theirs: Any) -> None:
    """Running requests end and new ones are refused, with the reason, until it is repaired."""

    def breaking() -> Any:
        yield "lm_head.weight", theirs.lm_head.weight.detach()
        yield "lm_head.weight", torch.zeros(3, 3)

    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        stream = llm.stream("dog", greedy(8))
        next(stream)
        with pytest.raises(WeightLoadError):
            llm.update_weights(breaking())
        last = list(stream)[-1]
        assert last.finished
        assert "an update of the weights failed" in str(last.error)
        for refused in (lambda: llm.generate("fox"), lambda: next(llm.stream("fox"))):
            with pytest.raises(ModelNotReadyError, match="requests: an update of the weights fail"):
                refused()
        with pytest.raises(ModelNotReadyError, match=r"whole checkpoint, or reload_weights\(\)"):
            llm.wake_up()
        with pytest.raises(ModelNotReadyError, match=r"sleep\(level=2\) drops"):
            llm.sleep()
        llm.reload_weights()
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


def test_an_interrupted_update_is_repaired_by_reloading_or_a_whole_update(
    folder: Path, theirs: Any
) -> None:
    """The model has some new weights, and refuses to run before all are of one checkpoint."""
    state = theirs.state_dict()

    def breaking() -> Any:
        yield "model.norm.weight", state["model.norm.weight"] * 3
        raise OSError("disk gone")

    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        repairs = (llm.reload_weights, lambda: llm.update_weights(state), llm.reload_weights)
        for repair in repairs:
            with pytest.raises(OSError, match="disk gone"):
                llm.update_weights(breaking())
            with pytest.raises(ModelNotReadyError, match="disk gone"):
                llm.generate("fox", greedy(5), False)
            repair()
            assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before
        model = llm.executor.worker.model
        load_weights = model.load_weights
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "load_weights", lambda weights: load_weights(breaking()))
            with pytest.raises(OSError, match="disk gone"):
                llm.reload_weights()
        with pytest.raises(ModelNotReadyError, match="reloading the weights failed: OSError: disk"):
            llm.generate("fox", greedy(5), False)
        llm.update_weights(state)
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before
        llm.update_weights({"model.norm.weight": state["model.norm.weight"].flip(0)})
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids != before
        llm.reload_weights()  # the checkpoint as it is on disk, though nothing slept
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("level", [0, 1, 2])
def test_only_a_whole_checkpoint_repairs_weights_of_other_digests(
    folder: Path, theirs: Any, level: int
) -> None:
    """Neither the KV cache that wakes up nor an update that is refused lets them run."""
    state = theirs.state_dict()
    other = {**state, "lm_head.weight": state["lm_head.weight"].flip(0)}
    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        if level:
            llm.sleep(level)
            llm.wake_up(["weights"])
        with pytest.raises(WeightReadError, match=r"not have the digests .* model\.norm\.weight"):
            llm.update_weights(other, digests={"model.norm.weight": "0" * 32})
        part = {"model.norm.weight": state["model.norm.weight"]}
        for refused in ({**state, "no.weight": state["lm_head.weight"]}, part):
            with pytest.raises(WeightLoadError):
                llm.update_weights(refused)
        for tags in (["kv_cache"] if level else None, None):
            with pytest.raises(ModelNotReadyError, match=r"repairs no update.* the digests"):
                llm.wake_up(tags)
        with pytest.raises(ModelNotReadyError, match="an update of the weights failed"):
            llm.generate("fox", greedy(5), False)
        llm.update_weights(state)
        llm.wake_up()
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


def test_nothing_is_updated_while_it_sleeps(folder: Path, theirs: Any) -> None:
    """A sleeping engine refuses an update, stays asleep, and can wake up."""
    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        llm.sleep()
        with pytest.raises(RuntimeError, match=r"the engine sleeps.*wake_up\(\) first"):
            llm.update_weights(theirs.state_dict())
        with pytest.raises(ModelNotReadyError, match="sleeps"):
            llm.generate("fox", greedy(5), False)
        llm.wake_up()
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before

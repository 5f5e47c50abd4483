"""Boxes of a trainer's ranks come to each rank of an engine that started them itself."""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.cooperative import SentBoxes, send_boxes
from vllm_module.distributed import together
from vllm_module.errors import ModelNotReadyError, WeightLoadError, WeightReadError
from vllm_module.kernels.digest.digest import digest_box
from vllm_module.layout import Layout, TransferPlan, layout_of_shards, layout_of_state_dict, rows
from vllm_module.weights import init_weight_transfer

SUPPORT = runpy.run_path(str(Path(__file__).parent.parent / "support.py"))
TRAINERS = 2
PROMPT = [1, 2, 3, 4, 5]
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 20, "max_model_len": 32,
    "distributed_executor_backend": "mp",
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("llama", {"distributed_executor_backend": "uni"}),
    "two ranks": ("llama", {"tensor_parallel_size": 2}),
    "two stages": ("llama", {"pipeline_parallel_size": 2}),
    "experts": ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "FP8": ("llama", {"tensor_parallel_size": 2, "quantization": "fp8_per_channel"}),
    "int4": (
        "llama",
        {"tensor_parallel_size": 2, "quantization": {"scheme": "int4_per_group", "group_size": 8}},
    ),
}
# The trainer has the state dict of transformers' class, which is no checkpoint's.
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("qwen3_moe", {"tensor_parallel_size": 2}),
    "fused, experts on ranks": ("mixtral", CASES["experts"][1]),
    "fused, two stages": ("qwen3_moe", CASES["two stages"][1]),
    "fused, FP8": ("mixtral", CASES["FP8"][1]),
    "fused, int4": ("qwen3_moe", CASES["int4"][1]),
}
AT_LENGTH = ("fused, two stages", "fused, FP8", "fused, int4")


def model_of(kind: str, seed: int) -> Any:
    """Return a model of transformers whose logits differ clearly."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **SIZES | MORE.get(kind, {}))
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model.eval()


def tokens(llm: LLM) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, greedy, use_tqdm=False)
    assert output.error is None, output.error
    return list(output.outputs[0].token_ids)


def expected_tokens(model: Any) -> list[int]:
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(prompt, max_new_tokens=6, do_sample=False)
    return [int(each) for each in out[0, len(PROMPT) :]]


class Trainer:
    """Ranks of a trainer, each a thread, with all tensors of a checkpoint or model on each."""

    def __init__(self, folder: Path, model: Any = None) -> None:
        self.folder, self.model = folder, model
        self.pool = ThreadPoolExecutor(TRAINERS)
        self.layout: Layout | None = None

    def weights(self) -> dict[str, torch.Tensor]:
        if self.model is not None:
            return dict(self.model.state_dict())
        return load_file(self.folder / "model.safetensors")

    def digests(self) -> dict[str, str]:
        return {name: digest_box(each).hex for name, each in self.weights().items()}

    def plan(self, llm: LLM) -> TransferPlan:
        port, weights = SUPPORT["free_port"](), self.weights()

        def described(rank: int) -> Layout:
            group = init_weight_transfer("127.0.0.1", port, rank, TRAINERS, timeout=60)
            return layout_of_state_dict(weights, group)

        self.layout, _ = self.pool.map(described, range(TRAINERS))
        target = llm.layout() if self.model is None else llm.layout(self.layout)
        return TransferPlan(self.layout, pickle.loads(pickle.dumps(target)))  # as it comes there

    def send(
        self,
        plan: TransferPlan,
        port: int,
        change: Callable[[int], Mapping[str, Any]],
        then: Callable[[int], object] = bool,
        **how: Any,
    ) -> list[Future[None]]:
        """Begin to send what ``change`` returns for each rank, which calls ``then`` at the end."""
        layout, weights = self.layout, self.weights()
        assert layout is not None

        def send(rank: int) -> None:
            size = plan.source_ranks + plan.target_ranks
            group = init_weight_transfer("127.0.0.1", port, rank, size, timeout=60)

            def work() -> None:
                send_boxes(plan, layout, {**weights, **change(rank)}, group=group, **how)
                then(rank)

            together(work, timeout=60, group=group)

        return [self.pool.submit(send, rank) for rank in range(TRAINERS)]


@contextmanager
def both(tmp_path: Path, case: str) -> Iterator[tuple[LLM, Trainer]]:
    """Yield an engine with weights of seed 0, and a trainer with those of seed 1."""
    kind, more = (CASES | FUSED)[case]
    model_of(kind, 0).save_pretrained(tmp_path / "first")
    model = model_of(kind, 1)
    model.save_pretrained(tmp_path / "next")
    trainer = Trainer(tmp_path / "next", model if case in FUSED else None)
    with LLM(str(tmp_path / "first"), **SETTINGS | more) as llm, trainer.pool:
        yield llm, trainer


def unchanged(rank: int) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in (*CASES, *FUSED) if case not in AT_LENGTH),
        *(pytest.param(case, marks=pytest.mark.at_length) for case in AT_LENGTH),
    ],
)
def test_each_rank_gets_its_boxes(tmp_path: Path, case: str) -> None:
    """Tokens are transformers', and of a quantized engine those of one that loads the weights."""
    kind, more = (CASES | FUSED)[case]
    with both(tmp_path, case) as (llm, trainer):
        plan, port = trainer.plan(llm), SUPPORT["free_port"]()
        before = tokens(llm)
        sending = trainer.send(plan, port, unchanged, weight_version="next")
        llm.update_weights(
            SentBoxes(plan, "127.0.0.1", port, timeout=60, weight_version="next"),
            digests=trainer.digests() if case in FUSED else None,
            weight_version="next",
        )
        for each in sending:
            each.result()
        after, version, digest = tokens(llm), llm.weight_version, llm.digest()
    assert version == "next"
    if "quantization" in more:
        with LLM(str(trainer.folder), **SETTINGS | more) as fresh:
            assert (tokens(fresh), fresh.digest()) == (after, digest)
    else:
        assert before == expected_tokens(model_of(kind, 0))
        assert after == expected_tokens(model_of(kind, 1))


def is_nan(rank: int) -> dict[str, Any]:
    return {"model.norm.weight": torch.full((32,), torch.nan)}


def fails_in_second(rank: int) -> dict[str, Any]:
    if rank:
        raise ValueError("of the trainer")
    return {}


def test_what_fails_is_named_and_the_next_round_works(tmp_path: Path) -> None:
    """Before anything is written the engine goes on; after it, it refuses until all comes again."""
    with both(tmp_path, "two ranks") as (llm, trainer):
        plan, before = trainer.plan(llm), tokens(llm)

        def update(change: Callable[[int], Mapping[str, Any]], **how: Any) -> None:
            port = SUPPORT["free_port"]()
            sending = trainer.send(plan, port, change, **how)
            try:
                llm.update_weights(SentBoxes(plan, "127.0.0.1", port, timeout=60))
            finally:
                for each in sending:
                    each.exception()

        assert trainer.layout is not None
        one = layout_of_shards(trainer.layout.tensors, 1, lambda *of: rows(*of[1:], ranks=1))
        other = TransferPlan(trainer.layout, one)
        with pytest.raises(ValueError, match=r"is to 1 ranks, and the engine has 2: .*llm\.layout"):
            llm.update_weights(SentBoxes(other, "127.0.0.1", 1))
        with pytest.raises(WeightReadError, match="did not all come to rank 0 of the engine"):
            llm.update_weights(SentBoxes(plan, "127.0.0.1", SUPPORT["free_port"](), timeout=0.5))
        assert tokens(llm) == before
        with pytest.raises(WeightReadError, match="another version"):
            update(unchanged, weight_version="older")
        assert tokens(llm) == before
        with pytest.raises(WeightLoadError, match=r"of the trainer|ended|left"):
            update(fails_in_second)
        with pytest.raises(WeightLoadError, match=r"model\.norm\.weight has a NaN"):
            update(is_nan)
        update(unchanged)
        assert tokens(llm) == expected_tokens(model_of("llama", 1))


@pytest.mark.parametrize("case", ["one rank", "two ranks"])
def test_a_trainer_that_fails_once_all_was_sent(tmp_path: Path, case: str) -> None:
    """What was written is not served under the name of the old weights, nor with their keys."""
    with both(tmp_path, case) as (llm, trainer):
        plan, port = trainer.plan(llm), SUPPORT["free_port"]()
        sending = trainer.send(plan, port, unchanged, fails_in_second)
        with pytest.raises(WeightReadError, match=r"rank 1 of . failed: .*of the trainer"):
            llm.update_weights(SentBoxes(plan, "127.0.0.1", port, timeout=60))
        for each in sending:
            each.exception()
        assert llm.weight_version == "0"
        with pytest.raises(ModelNotReadyError, match="of the trainer"):
            tokens(llm)
        port = SUPPORT["free_port"]()
        trainer.send(plan, port, unchanged)
        llm.update_weights(SentBoxes(plan, "127.0.0.1", port, timeout=60))
        assert tokens(llm) == expected_tokens(model_of("llama", 1))


def test_a_sleeping_engine_wakes_up_with_its_own_weights_after_it(tmp_path: Path) -> None:
    with both(tmp_path, "one rank") as (llm, trainer):
        plan, port, before = trainer.plan(llm), SUPPORT["free_port"](), tokens(llm)
        llm.sleep(level=2)
        sending = trainer.send(plan, port, unchanged, fails_in_second)
        with pytest.raises(WeightReadError, match="of the trainer"):
            llm.update_weights(SentBoxes(plan, "127.0.0.1", port, timeout=60))
        for each in sending:
            each.exception()
        llm.wake_up()
        assert tokens(llm) == before


def test_the_next_round_may_meet_at_the_same_port(tmp_path: Path) -> None:
    """Nothing listens there after a round, though a trainer collects no garbage meanwhile."""
    with both(tmp_path, "one rank") as (llm, trainer):
        plan, port = trainer.plan(llm), SUPPORT["free_port"]()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                sending = trainer.send(plan, port, unchanged)
                llm.update_weights(SentBoxes(plan, "127.0.0.1", port, timeout=60))
                for each in sending:
                    each.result()
        finally:
            gc.enable()
        assert tokens(llm) == expected_tokens(model_of("llama", 1))


def test_a_plan_to_other_parts_than_the_ranks_keep_is_refused(tmp_path: Path) -> None:
    """Its ranks are as many: those of two stages, and experts as they were before they moved."""
    with both(tmp_path / "stages", "two stages") as (staged, of_stages):
        stages = of_stages.plan(staged)
    with both(tmp_path / "ranks", "two ranks") as (llm, _):
        before = tokens(llm)
        with pytest.raises(ValueError, match=r"other parts of model\.\S+ to the ranks than they"):
            llm.update_weights(SentBoxes(stages, "127.0.0.1", 1))
        assert tokens(llm) == before
    for case, name in ("experts", "experts.0"), ("fused, experts on ranks", "experts.gate_up_proj"):
        with both(tmp_path / case, case) as (llm, trainer):
            plan, before = trainer.plan(llm), tokens(llm)
            old = llm.expert_placements()
            llm.rearrange_experts(placements={path: [*each][::-1] for path, each in old.items()})
            assert tokens(llm) == before
            with pytest.raises(ValueError, match=rf"other parts of .*{name}.*, and again once exp"):
                llm.update_weights(SentBoxes(plan, "127.0.0.1", 1, timeout=1))


@contextmanager
def halting_trainer(
    folder: Path, directory: Path, sign: int, llm: LLM, named: str = ""
) -> Iterator[SentBoxes]:
    """Yield boxes of two processes; the first one halts by a signal, the other one says so."""
    directory.mkdir()
    layout_port, port = SUPPORT["free_port"](), SUPPORT["free_port"]()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("box_sender.py")), str(folder),
             str(rank), str(layout_port), str(port), str(-1 if rank else sign)],
            cwd=directory, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(TRAINERS)
    ]  # fmt: skip
    try:
        SUPPORT["wait_until"]((directory / "layout").exists, "the trainer has a layout")
        layout = pickle.loads((directory / "layout").read_bytes())
        plan = TransferPlan(layout, llm.layout())
        (directory / "part").write_bytes(pickle.dumps(plan))
        (directory / "part").rename(directory / "plan")
        yield SentBoxes(plan, "127.0.0.1", port, bucket_bytes=8192, timeout=30)
    finally:
        for rank in ranks:
            if rank is ranks[0] and sign >= 0:
                rank.kill()
        said = [rank.communicate()[1] for rank in ranks]
    assert named in said[1]
    assert ranks[1].returncode == bool(named)


@pytest.mark.at_length
@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_process_that_halts_in_the_middle_is_named(tmp_path: Path, sign: int) -> None:
    """By the engine and by the other process, within the timeout; the next round works."""
    first, second, named = tmp_path / "one", tmp_path / "two", "rank 0 of 4 "
    with both(tmp_path, "two ranks") as (llm, trainer):
        with (
            halting_trainer(trainer.folder, first, sign, llm, named) as boxes,
            pytest.raises(WeightReadError) as raised,
        ):
            llm.update_weights(boxes)
        assert [rank for rank in range(4) if f"rank {rank} of 4 " in str(raised.value)] == [0]
        with pytest.raises(ModelNotReadyError, match=named):
            tokens(llm)
        with halting_trainer(trainer.folder, second, -1, llm) as boxes:
            llm.update_weights(boxes)
        assert tokens(llm) == expected_tokens(model_of("llama", 1))


@pytest.mark.at_length
@pytest.mark.parametrize("case", ["one rank", "two ranks"])
def test_an_interrupt_ends_a_wait_for_boxes(tmp_path: Path, case: str) -> None:
    """It is raised at once, the trainer is told, and what is a mixture is not served."""
    directory, named = tmp_path / "round", "failed: KeyboardInterrupt"
    with both(tmp_path, case) as (llm, trainer):
        with halting_trainer(trainer.folder, directory, 0, llm, named) as boxes:

            def interrupt() -> None:
                SUPPORT["wait_until"]((directory / "halts").exists, "the trainer halts")
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                llm.update_weights(boxes)
        with pytest.raises((ModelNotReadyError, RuntimeError), match="KeyboardInterrupt"):
            tokens(llm)

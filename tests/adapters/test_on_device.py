"""Steps with adapters on a simulated device: graphs of one adapter's, and others without."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vllm_module import LLM, SamplingParams

HERE = Path(__file__)
SimulatedDevice = runpy.run_path(str(HERE.parents[1] / "runtime/simulated_device.py"))[
    "SimulatedDevice"
]
support = runpy.run_path(str(HERE.with_name("support.py")))
PROMPTS = [[5, 6, 7], [9, 1, 4, 4, 8, 2], [3]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@contextmanager
def engine(folder: Path, device: str) -> Iterator[LLM]:
    with LLM(
        str(folder), device=device, dtype="float32", skip_tokenizer_init=True, max_model_len=32,
        max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        yield llm


def tokens(llm: LLM, names: list[str | None]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=names)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [list(output.outputs[0].token_ids) for output in outputs]


def replays(llm: LLM) -> dict[Any, int]:
    """Return how often graphs were replayed, by the adapter that they are of."""
    counts: dict[Any, int] = {}
    for ((adapter, _), _), graph in llm.executor.worker.runner._graphs.items():
        counts[adapter] = counts.get(adapter, 0) + graph.replays
    return counts


def saved(family: str, folder: Path) -> tuple[Path, list[Path]]:
    """Save a model and two adapters of it."""
    base, adapters = folder / "base", [folder / "one", folder / "two"]
    _, settings = support["FAMILIES"][family]
    for seed, path in enumerate(adapters):
        support["adapt"](support["small_model"](family, base), path, seed=seed, **settings)
    return base, adapters


ORDER: list[list[str | None]] = [
    ["one"] * 3, [None] * 3, ["two"] * 3, ["one", None, "two"], ["one"] * 3, [None] * 3,
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_a_step_of_one_adapter_is_one_graph(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens are those of a CPU in any order of adapters, and after one is loaded again."""
    base, adapters = saved(family, tmp_path)
    device, found, expected = SimulatedDevice(), [], []
    with engine(base, "cpu") as llm:
        for path in adapters:
            llm.load_adapter(path.name, str(path))
        expected = [tokens(llm, names) for names in ORDER]
    assert len({str(each) for each in expected}) >= 4, "adapters change something"
    with device.serving(1 << 26), engine(base, "cuda") as llm, caplog.at_level(logging.WARNING):
        for path in adapters:
            llm.load_adapter(path.name, str(path))
        counts = []
        for names in ORDER:
            found.append(tokens(llm, names))
            counts.append(replays(llm))
        numbers = [each for each in counts[-1] if each is not None]
        llm.unload_adapter("one")
        assert numbers[:1] == [] or numbers[0] not in replays(llm)
        llm.load_adapter("one", str(adapters[1]))
        assert tokens(llm, ["one"] * 3) == expected[2]
        llm.update_adapter("two", load_file(adapters[0] / "adapter_model.safetensors"))
        assert tokens(llm, ["two"] * 3) == expected[0], "graphs read what is updated in place"
    assert found == expected
    if family == "deepseek_v3":  # experts ask the host which rows are whose
        assert numbers == []
        assert "no CUDA graphs, because of" in caplog.text
        return
    assert len(numbers) == 2
    one, two = numbers
    steps = [count.get(one, 0) for count in counts]
    assert steps[0] > 0
    assert steps[0] == steps[1] == steps[2] == steps[3] < steps[4]
    assert counts[2][two] > 0
    assert counts[1][None] > counts[0][None]
    assert counts[3] == counts[2], "a step of several adapters has no graph"

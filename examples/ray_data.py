"""A dataset, completed by two engines of two ranks. It wants ``pip install 'ray[data]'``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
from small_checkpoint import write_checkpoint

from vllm_module import LLM, SamplingParams


class Completer:
    """An actor of Ray Data. It has one CPU; the engine asks Ray for that of the other rank."""

    def __init__(self, folder: str) -> None:
        self.llm = LLM(
            folder, device="cpu", tensor_parallel_size=2, distributed_executor_backend="ray"
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in batch["prompt"]]
        greedy = SamplingParams(temperature=0, max_tokens=8)
        outputs = self.llm.generate(prompts, greedy, use_tqdm=False)
        return {**batch, "tokens": [list(each.outputs[0].token_ids) for each in outputs]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        # On a cluster: the one of RAY_ADDRESS, or of `ray start`.
        ray.init(num_cpus=5)
        prompts = [{"prompt": [number, number + 1, number + 2]} for number in range(16)]
        completed = (
            ray.data.from_items(prompts)
            .map_batches(Completer, fn_constructor_args=(folder,), batch_size=4, concurrency=2)
            .take_all()
        )
        with LLM(folder, device="cpu") as llm:
            greedy = SamplingParams(temperature=0, max_tokens=8)
            same = 0
            for row in completed:
                prompt = {"prompt_token_ids": [int(each) for each in row["prompt"]]}
                (alone,) = llm.generate(prompt, greedy, use_tqdm=False)
                same += list(row["tokens"]) == list(alone.outputs[0].token_ids)
        print(f"{same} of {len(completed)} completions equal one rank's")
        ray.shutdown()


if __name__ == "__main__":
    main()

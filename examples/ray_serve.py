"""A deployment of Ray Serve with an engine of two ranks. It wants ``pip install 'ray[serve]'``."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray import serve
from small_checkpoint import write_checkpoint

from vllm_module import LLM, AsyncLLM, SamplingParams


# A bundle for each rank: a replica and its ranks are placed together, or not at all.
@serve.deployment(
    ray_actor_options={"num_cpus": 1}, placement_group_bundles=[{"CPU": 1}, {"CPU": 1}]
)
class Completions:
    def __init__(self, folder: str) -> None:
        self.engine = AsyncLLM(
            folder, device="cpu", tensor_parallel_size=2, distributed_executor_backend="ray"
        )

    async def __call__(self, request: Any) -> dict[str, Any]:
        asked = await request.json()
        greedy = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
        prompt = {"prompt_token_ids": asked["prompt"]}
        async for output in self.engine.generate(prompt, greedy, every_token=False):
            tokens = list(output.outputs[0].token_ids)
        return {"tokens": tokens}

    async def check_health(self) -> None:
        # Ray Serve starts a replica again whose engine has ended, as where a node was lost.
        await self.engine.check_health()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        ray.init(num_cpus=4)
        serve.run(Completions.bind(folder))
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8}).encode()
        with urllib.request.urlopen("http://127.0.0.1:8000/", body) as answer:
            served = json.load(answer)["tokens"]
        with LLM(folder, device="cpu") as llm:
            greedy = SamplingParams(temperature=0, max_tokens=8)
            (alone,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, greedy, use_tqdm=False)
        print(f"{served} equals one rank's: {served == list(alone.outputs[0].token_ids)}")
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

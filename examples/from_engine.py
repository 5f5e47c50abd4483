"""An engine on one rank starts from the memory of one on two ranks, which goes on serving."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from small_checkpoint import write_checkpoint

from vllm_module import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = write_checkpoint(Path(folder))
        with (
            LLM(folder, device="cpu", tensor_parallel_size=2) as first,
            first.serve_weights() as server,
        ):
            # So what the other one loads is nowhere but in the first one's memory.
            first.update_weights({name: each * 1.25 for name, each in weights.items()})
            os.environ["VLLM_MODULE_REPLICA_TOKEN"] = server.token
            with LLM(server.url, device="cpu") as second:
                for llm in (first, second):
                    (output,) = llm.generate(
                        {"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False
                    )
                    print(f"{llm.digest().hex} {output.outputs[0].token_ids}")


if __name__ == "__main__":
    main()

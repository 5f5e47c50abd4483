"""A policy and its reference in one process: two engines, of which one takes new weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from small_checkpoint import write_checkpoint

from vllm_module import LLM, SamplingParams

SAMPLED = SamplingParams(temperature=1, seed=0, max_tokens=8, logprobs=0)


def logprobs(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Return the logarithm of the probability of each token after the first."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    found = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([of_token[token].logprob for token, of_token in found])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = write_checkpoint(Path(folder))
        with LLM(folder, device="cpu") as policy, LLM(folder, device="cpu") as reference:
            for step in range(3):
                (output,) = policy.generate({"prompt_token_ids": [1, 2]}, SAMPLED, use_tqdm=False)
                tokens = [1, 2, *output.outputs[0].token_ids]
                ratio = logprobs(policy, tokens) - logprobs(reference, tokens)
                print(f"version {policy.weight_version} is {ratio.abs().max():.3f} away")
                torch.manual_seed(step)
                policy.update_weights(
                    {name: each + 0.1 * torch.randn_like(each) for name, each in weights.items()},
                    weight_version=f"step-{step}",
                )
            unchanged = len(reference.digest().differences(policy.digest())) == len(weights)
            print(f"the reference is {reference.weight_version}: {unchanged}")


if __name__ == "__main__":
    main()

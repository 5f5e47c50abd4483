"""TRL's GRPO trains a small model, and an engine of ours makes what it learns from.

Before each batch the engine takes the trainer's weights; TRL gets the engine's tokens and their
logprobs. A completion's reward is the share of its tokens that are even. TRL is a package of its
own: ``pip install trl``. It calls the function that makes completions experimental.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from small_checkpoint import LLAMA, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from vllm_module import LLM, SamplingParams

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
STEPS, TOKENS = 30, 8
SAMPLED = SamplingParams(temperature=1, max_tokens=TOKENS, logprobs=0, ignore_eos=True)


class Rollout:
    """Completions of an engine that has the trainer's weights; TRL's ``rollout_func``.

    Attributes:
        apart: largest difference so far between a logprob of the engine and the trainer's model.

    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self.apart = llm, 0.0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return tokens and logprobs of a completion for each prompt."""
        version = f"step-{trainer.state.global_step}"
        if self._llm.weight_version != version:
            self._llm.update_weights(trainer.model.state_dict(), weight_version=version)
        outputs = self._llm.generate(prompts, SAMPLED, use_tqdm=False)
        samples = [output.outputs[0] for output in outputs]
        made = {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [
                [of_token[token].logprob for token, of_token in zip(*each, strict=True)]
                for each in ((sample.token_ids, sample.logprobs) for sample in samples)
            ],
        }
        self.compare(trainer.model, **made)
        return made

    @torch.no_grad()
    def compare(self, model: Any, **made: list[list[Any]]) -> None:
        """Compare the engine's logprobs with those of the trainer's model."""
        for prompt, tokens, logprobs in zip(*made.values(), strict=True):
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
            own = logits[len(prompt) - 1 : -1].log_softmax(-1)[range(len(tokens)), tokens]
            self.apart = max(self.apart, (own - torch.tensor(logprobs)).abs().max().item())


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of even tokens in each completion."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer that has a token for each number."""
    numbers = {str(number): number for number in range(LLAMA["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0", pad_token="0")
    found.save_pretrained(folder)
    return found


def main() -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), LLAMA | {"model_type": "llama"})
        tokenizer = write_tokenizer(Path(folder))
        settings = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, seed=0, max_steps=STEPS, logging_steps=1,
            per_device_train_batch_size=32, num_generations=8, max_completion_length=TOKENS,
            learning_rate=1e-2, lr_scheduler_type="constant", gradient_checkpointing=False,
            report_to="none", disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        with LLM(folder, device="cpu", seed=0) as llm:
            rollout = Rollout(llm)
            trainer = GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(folder),
                reward_funcs=reward,
                args=settings,
                train_dataset=Dataset.from_dict({"prompt": [f"{n} {n + 1}" for n in range(64)]}),
                processing_class=tokenizer,
                rollout_func=rollout,
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("reward", *(f"{each:.2f}" for each in rewards))
    print(f"engine and trainer are at most {rollout.apart:.0e} apart")


if __name__ == "__main__":
    main()

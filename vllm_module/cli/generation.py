"""One batch of prompts on every rank; the first rank shows what comes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from vllm_module.cli.model_source import ModelSource
from vllm_module.cli.output import CommandError, console
from vllm_module.cli.progress import load_weights
from vllm_module.config import ModelConfig
from vllm_module.runtime.generate import stream
from vllm_module.runtime.tokenizer import TextStream, Tokenizer, stop_tokens


@dataclass
class Completion:
    """A prompt and what came of it so far; ``text`` stays None where token ids were given."""

    prompt: str | None
    prompt_ids: list[int]
    text: str | None = None
    ids: list[int] = field(default_factory=list)
    stopped: bool = False  # by a stop token


@dataclass
class Job:
    """What all ranks have in common; ``seconds`` is what generating took, without loading."""

    found: ModelSource
    completions: list[Completion]
    texts: list[TextStream]  # one for each completion, none where token ids were given
    stops: Collection[int]
    max_new_tokens: int
    quiet: bool
    seconds: float = 0.0

    @classmethod
    def prepare(
        cls,
        model_config: ModelConfig,
        completions: list[Completion],
        max_new_tokens: int,
        quiet: bool,
    ) -> Job:
        """Read what is beside the weights, and encode the prompts."""
        found = ModelSource.find(model_config)
        texts = []
        if completions[0].prompt is not None:
            tokenizer = Tokenizer(found.folder)
            for completion in completions:
                completion.prompt_ids = tokenizer.encode(completion.prompt or "")
                completion.text = ""
                texts.append(TextStream(tokenizer, completion.prompt_ids))
        stops = stop_tokens(found.folder)
        return cls(found, completions, texts, stops, max_new_tokens, quiet)

    def begin(self, device: torch.device, rank: int) -> Iterator[dict[int, int]]:
        """Load this rank's model and return its steps, none of them taken yet."""
        with self.found.open() as checkpoint:
            model = self.found.build(device)
            load_weights(model, checkpoint, f"rank {rank}", shown=rank == 0)
        prompts = [completion.prompt_ids for completion in self.completions]
        try:
            return stream(model, prompts, self.max_new_tokens, self.stops)
        except ValueError as error:  # about the prompts, before the first step
            raise CommandError(str(error)) from error

    def run(self, steps: Iterator[dict[int, int]], *, printing: bool) -> None:
        """Take all steps; the rank that is ``printing`` keeps and shows what comes."""
        start = time.perf_counter()
        alone = len(self.completions) == 1 and not self.quiet
        if printing and alone:
            console().print(self.completions[0].prompt or "", style="bold", end="")
        for step in steps:
            for index, token in step.items() if printing else ():
                piece = self._keep(index, token)
                if alone:
                    print(piece, end="", flush=True)
                elif not self.quiet and self._is_done(self.completions[index]):
                    self._print(index)
        if printing:
            self.seconds = time.perf_counter() - start
            if alone:
                print(flush=True)

    def _keep(self, index: int, token: int) -> str:
        """Add a token to its completion and return what there is to show of it."""
        completion = self.completions[index]
        completion.ids.append(token)
        completion.stopped = token in self.stops
        if completion.text is None:
            return f"{',' if len(completion.ids) > 1 else ''}{token}"
        piece = self.texts[index].push(token)
        if self._is_done(completion):
            piece += self.texts[index].finish()
        completion.text += piece
        return piece

    def _is_done(self, completion: Completion) -> bool:
        return completion.stopped or len(completion.ids) == self.max_new_tokens

    def _print(self, index: int) -> None:
        completion = self.completions[index]
        out = console()
        out.print(f"[{index + 1}] ", style="dim", end="")
        out.print(completion.prompt or "", style="bold", end="")
        text = ",".join(map(str, completion.ids)) if completion.text is None else completion.text
        print(text, flush=True)

"""The demo's steps: each shows what it found, and raises where that is not as it should be."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from vllm_module.cli.demo_checks import Visit, llm_tokens, transformers_tokens, visit
from vllm_module.cli.output import CommandError, printable, size
from vllm_module.cli.rank_plan import RankPlan, Read, fold_reads, plan_rank
from vllm_module.errors import ShardingError
from vllm_module.model_source import ModelSource
from vllm_module.runtime.tokenizer import Tokenizer, stop_tokens

_SIZES = (1, 2, 4)
_MOST_LINES = 7


@dataclass
class Story:
    """The demo's output: numbered steps, and a mark for what was checked."""

    out: Console
    step: int = 0

    def title(self, text: str) -> None:
        """Begin the next step."""
        self.step += 1
        self.out.print(f"\n{self.step}. {text}", style="bold")

    def line(self, text: str) -> None:
        """Say what is so."""
        self.out.print(f"   {printable(text)}")

    def ok(self, text: str) -> None:
        """Say what was checked."""
        self.out.print(Text.assemble("   ", ("✓", "green"), f" {printable(text)}"))

    def quote(self, text: str, hang: str = "") -> None:
        """Show a longer text, lines that go on indented by ``hang``."""
        for line in printable(text).splitlines():
            indent = line[: len(line) - len(line.lstrip())] + hang
            for row in textwrap.wrap(line, 84, subsequent_indent=indent) or [""]:
                self.out.print(f"   │ {row}", style="dim")


@dataclass(frozen=True)
class Prompt:
    """What the models go on from, for at most so many tokens; text if there is a tokenizer."""

    text: str | None
    ids: list[int]
    most: int
    stops: set[int]
    tokenizer: Tokenizer | None
    expected: str | None = None

    @classmethod
    def encode(
        cls, source: ModelSource, text: str, *, most: int, expected: str | None = None
    ) -> Prompt:
        """Encode ``text``; without a tokenizer, take a few token ids instead."""
        stops = stop_tokens(source.folder)
        if not (source.folder / "tokenizer.json").is_file():
            few = [min(token, source.config.vocab_size - 1) for token in (1, 2)]
            return cls(None, few, most, stops, None)
        tokenizer = Tokenizer(source.folder)
        return cls(text, tokenizer.encode(text), most, stops, tokenizer, expected)

    def show(self, tokens: list[int]) -> str:
        """Return the prompt and what followed, as text or token ids."""
        if self.tokenizer is None:
            return f"{self.ids} goes on with {tokens}"
        return self.tokenizer.decode(self.ids + tokens)


def show_plan(story: Story, source: ModelSource) -> list[int]:
    """Plan each size; show one rank of size 2 in short, and return the sizes that divide."""
    plans: dict[int, list[RankPlan]] = {}
    refusals = []
    with source.open() as checkpoint:
        for tp_size in _SIZES:
            try:
                plans[tp_size] = [
                    plan_rank(source, checkpoint, rank, tp_size) for rank in range(tp_size)
                ]
            except ShardingError as error:
                refusals.append(f"size {tp_size} is left out: {error}")
        nbytes = checkpoint.nbytes
    tp_size = 2 if 2 in plans else max(plans)
    rank = plans[tp_size][-1]
    story.title(f"A plan for tensor-parallel size {tp_size}, before a byte of weights is read")
    rank.report.raise_if_refused(source.config.architectures[0], touched=False)
    reads = sorted(fold_reads(rank.reads), key=lambda read: (not read.slot, read.pieces < 2))
    cells = [_cells(read) for read in reads[:_MOST_LINES]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    story.line(f"rank {rank.rank}, in every layer: bytes of a tensor → parameter")
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        story.line(f"  {line.rstrip()}")
    story.line(f"  … `vllm-module plan` shows all {len(reads)} lines")
    kept = ", ".join(f"rank {each.rank} {size(each.bytes_read)}" for each in plans[tp_size])
    story.line(f"of {size(nbytes)} will be read: {kept}")
    for refusal in refusals:
        story.line(refusal)
    return list(plans)


def load_sizes(story: Story, source: ModelSource, sizes: list[int], prompt: Prompt) -> list[Visit]:
    """Load and run each size, and compare it with the checkpoint and with the first."""
    story.title(f"Load at tensor-parallel sizes {_listed(sizes)}, the ranks in threads")
    visits: list[Visit] = []
    for tp_size in sizes:
        done = visit(source, tp_size, prompt.ids, prompt.most, prompt.stops)
        visits.append(done)
        heads = getattr(source.config, "num_key_value_heads", tp_size)
        shared = f"; {heads} key-value heads, so ranks share them" if heads < tp_size else ""
        story.line(f"size {tp_size}: read {_ranks_read(done.bytes_read)}{shared}")
        story.ok("the shards, put together again, are the checkpoint bit for bit")
        if done is not visits[0]:
            difference = done.difference(visits[0])
            story.ok(f"logits are those of size {visits[0].tp_size}, within {difference:.1g}")
    return visits


def compare_texts(story: Story, source: ModelSource, visits: list[Visit], prompt: Prompt) -> None:
    """Show what was generated and that every size, and transformers, gave the same."""
    story.title("Generate, greedily" + (f', from "{prompt.text}"' if prompt.text else ""))
    tokens = llm_tokens(source.folder, prompt.ids, prompt.most)
    text = prompt.show(tokens)
    story.quote(text)
    if prompt.expected is not None and text != prompt.expected:
        raise CommandError("the model was taught another text than it generated")
    for each in visits[1:]:
        _same(prompt, tokens, each.tokens, f"tensor-parallel size {each.tp_size}")
    sizes = _listed([each.tp_size for each in visits])
    story.ok(f"the same {len(tokens)} tokens at size {sizes}")
    theirs = transformers_tokens(source.folder, prompt.ids, prompt.most, prompt.stops)
    if theirs is None:
        story.line("pip install vllm-module[demo] adds the comparison with transformers")
        return
    version, other = theirs
    _same(prompt, tokens, other, f"transformers {version}")
    story.ok(f"the same from transformers {version}, loading the same folder")


def _cells(read: Read) -> tuple[str, str, str, str]:
    span, slot = read.row()[3], read.slot
    name, parameter = (
        full.rpartition("}.")[2].removesuffix(".weight") for full in (read.name, read.parameter)
    )
    return name, span, f"→ {parameter}", f"slot {slot}" if slot else ""


def _ranks_read(bytes_read: list[int]) -> str:
    return " + ".join(size(nbytes) for nbytes in bytes_read)


def _listed(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last


def _same(prompt: Prompt, ours: list[int], other: list[int], whose: str) -> None:
    if ours != other:
        raise CommandError(
            f"{whose} generated another text:\n{prompt.show(other)}\ninstead of:\n"
            f"{prompt.show(ours)}"
        )

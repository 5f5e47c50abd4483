"""The demo's steps: each prints its results, and raises ``CommandError`` if one is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_module.base.messages import install
from vllm_module.build.model_source import ModelSource
from vllm_module.cli.demo.checks import SizeResult, run_size, transformers_tokens
from vllm_module.cli.demo.transcript import Transcript
from vllm_module.cli.output import CommandError, size
from vllm_module.cli.rank_plan import RankPlan, plan_ranks
from vllm_module.cli.tensor_plan import tensor_rows
from vllm_module.errors import ShardingError
from vllm_module.runtime.llm import LLM
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.text.tokenizer import Tokenizer

_SIZES = (1, 2, 4)
_MAX_LINES = 7


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens after it; ``prompt`` is text only if there is a tokenizer."""

    prompt: str | None
    ids: list[int]
    tokens: list[int]
    tokenizer: Tokenizer | None

    @classmethod
    def generate(cls, source: ModelSource, prompt: str, max_tokens: int) -> Text:
        """Continue a prompt greedily; without a tokenizer, continue two token ids instead."""
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        with LLM(str(source.folder), dtype="float32", device="cpu") as llm:
            last = llm.model_config.get_vocab_size() - 1
            given = prompt if llm.tokenizer else [min(token, last) for token in (1, 2)]
            (output,) = llm.generate(given, greedy, use_tqdm=False)
            if output.error:
                raise CommandError(output.error)
            tokens = output.outputs[0].token_ids
            return cls(output.prompt, output.prompt_token_ids, tokens, llm.tokenizer)

    def show(self, tokens: list[int]) -> str:
        """Return the prompt and the tokens after it, as text or token ids."""
        if self.tokenizer is None:
            return f"{self.ids} is continued by {tokens}"
        return self.tokenizer.decode(self.ids + tokens, skip_special_tokens=True)


def show_plan(transcript: Transcript, source: ModelSource) -> list[int]:
    """Plan each size and print a few lines of one rank; return the sizes that divide the model."""
    plans: dict[int, list[RankPlan]] = {}
    refusals = []
    with source.open() as checkpoint:
        for tp_size in _SIZES:
            try:
                plans[tp_size] = plan_ranks(source, checkpoint, tp_size)
            except ShardingError as error:
                refusals.append(f"size {tp_size} is left out: {error}")
        nbytes = checkpoint.nbytes
    tp_size = 2 if 2 in plans else max(plans)
    transcript.title(f"Plan tensor-parallel size {tp_size}, before any weights are read")
    plans[tp_size][0].report.raise_if_refused(source.config.architectures[0], touched=False)
    header, rows = tensor_rows(plans[tp_size][0].plans, every=False)
    rows.sort(key=lambda row: not row[-1])  # slots of fused parameters first
    transcript.line("each rank would read, in every layer:")
    shown = [list(map(_without_layer, row)) for row in rows[:_MAX_LINES]]
    transcript.table(header, shown, right=header.index("per rank"))
    transcript.line(f"… `vllm-module plan` shows all {len(rows)} lines")
    kept = ", ".join(f"rank {each.rank} {size(each.bytes_read)}" for each in plans[tp_size])
    transcript.line(f"of {size(nbytes)}, the ranks would read: {kept}")
    for refusal in refusals:
        transcript.line(refusal)
    return list(plans)


def load_sizes(
    transcript: Transcript, source: ModelSource, sizes: list[int], text: Text
) -> list[SizeResult]:
    """Load and run each size, and compare it with the checkpoint and with the first size."""
    transcript.title(f"Load at tensor-parallel sizes {_listed(sizes)}, the ranks in threads")
    results: list[SizeResult] = []
    for tp_size in sizes:
        result = run_size(source, tp_size, text.ids + text.tokens)
        results.append(result)
        read = " + ".join(size(nbytes) for nbytes in result.bytes_read)
        transcript.line(f"size {tp_size}: read {read}")
        heads = getattr(source.config, "num_key_value_heads", tp_size)
        if heads < tp_size:
            transcript.line(f"        the {tp_size} ranks share {heads} key-value heads")
        transcript.ok("the shards together are the checkpoint, bit for bit")
        if result is not results[0]:
            difference = result.logits_difference(results[0])
            transcript.ok(f"the logits are those of size {sizes[0]}, within {difference:.1g}")
    return results


def compare_texts(
    transcript: Transcript,
    source: ModelSource,
    results: list[SizeResult],
    text: Text,
    expected: str | None = None,
) -> None:
    """Print the generated text; check that every size, and transformers, generates the same.

    A size generates the same if each token is the most probable one after those before it.
    ``expected`` is the whole text that has to result, if it is known.
    """
    transcript.title("Generate greedily" + (f', from "{text.prompt}"' if text.prompt else ""))
    shown = text.show(text.tokens)
    transcript.quote(shown)
    if expected is not None and shown != expected:
        raise CommandError("the model generated another text than it was trained on")
    for result in results:
        chosen = result.logits[len(text.ids) - 1 : -1].argmax(-1).tolist()
        _check_same(text, chosen, f"tensor-parallel size {result.tp_size}")
    sizes = _listed([result.tp_size for result in results])
    transcript.ok(f"the same {len(text.tokens)} tokens at size {sizes}")
    peer = transformers_tokens(source.folder, text.ids, len(text.tokens))
    if peer is None:
        transcript.line(f"{install('demo')}, adds the comparison with transformers")
        return
    version, tokens = peer
    _check_same(text, tokens, f"transformers {version}")
    transcript.ok(f"the same tokens from transformers {version}, which loads the same folder")


def _without_layer(cell: str) -> str:
    """Return a tensor's name without the modules that all layers share."""
    return cell.rpartition("}.")[2].removesuffix(".weight")


def _listed(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last


def _check_same(text: Text, other: list[int], whose: str) -> None:
    if text.tokens != other:
        raise CommandError(
            f"{whose} generated another text:\n{text.show(other)}\ninstead of:\n"
            f"{text.show(text.tokens)}"
        )

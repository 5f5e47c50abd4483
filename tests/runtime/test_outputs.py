"""Every attribute of an output: which requests have it, and which do not."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    decode_logprobs,
    request_output,
)
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.text.prompts import refused, report_refused


def request(**params: Any) -> Request:
    """Return a request of two samples: one has ended after two tokens, one goes on."""
    made = Request("7", [1, 2], SamplingParams(n=2, **params), 0, 9, "text")
    made.sequences.append(made.new_sequence())
    for number, sequence in enumerate(made.sequences):
        sequence.tokens += [3, 4]
        sequence.text = f"sample {number}"
        sequence.logprobs = [{3: Logprob(-1.0, 1)}, {4: Logprob(-2.0, 2), 5: Logprob(-0.5, 1)}]
        sequence.cumulative_logprob = -3.0
    made.sequences[0].finish_reason, made.sequences[0].stop_reason = "stop", 4
    return made


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_outputs_are_what_the_request_has_so_far(logprobs: int | None) -> None:
    """Logprobs are there where they were asked for, 0 of them too; both lists are copies."""
    made = request(logprobs=logprobs)
    made.num_cached_tokens = 0
    made.metrics.num_generation_tokens = 4
    output = request_output(made)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("7", "text", [1, 2])
    assert (output.finished, output.error, output.num_cached_tokens) == (False, None, 0)
    assert (output.prompt_logprobs, output.lora_request) == (None, None)
    assert output.metrics == made.metrics
    assert output.metrics is not made.metrics
    for number, (sample, sequence) in enumerate(zip(output.outputs, made.sequences, strict=True)):
        assert sample == CompletionOutput(
            number,
            f"sample {number}",
            [3, 4],
            None if logprobs is None else -3.0,
            None if logprobs is None else sequence.logprobs,
            None if number else "stop",
            None if number else 4,
        )
        assert sample.finished() is (number == 0)
        assert sample.logprobs is not sequence.logprobs
    made.sequences[1].finish_reason = "length"
    made.error = "why"
    made.prompt_logprobs = [None, {2: Logprob(-1.0, 1)}]
    output = request_output(made)
    assert (output.finished, output.error) == (True, "why")
    assert output.prompt_logprobs == made.prompt_logprobs


def test_tokens_of_logprobs_get_their_text_once() -> None:
    """One whose text cannot be decoded stays without; special tokens are shown."""
    asked: list[Any] = []

    def decode(ids: list[int], skip: bool) -> str:
        asked.append((ids, skip))
        if ids == [5]:
            raise CheckpointFormatError("no")
        return f"<{ids[0]}>"

    tokenizer: Any = SimpleNamespace(decode=decode)
    known = Logprob(-1.0, 1, "known")
    entries: list[dict[int, Logprob] | None] = [
        None, {4: known}, {}, {3: Logprob(-1.0, 1), 5: Logprob(-2.0, 2), 6: Logprob(-3.0, 3)},
    ]  # fmt: skip
    decode_logprobs(entries, tokenizer)
    decode_logprobs(None, tokenizer)
    assert asked == [([3], False), ([5], False), ([6], False)]
    assert [{t: each.decoded_token for t, each in (entry or {}).items()} for entry in entries] == [
        {}, {4: "known"}, {}, {3: "<3>", 5: None, 6: "<6>"},
    ]  # fmt: skip


def test_what_is_refused_has_an_error_and_no_tokens() -> None:
    """The only prompt, and all of them, raise; some are logged with their numbers."""
    output = refused("3", "text", [1, 2], ValueError("why"))
    assert asdict(output.outputs[0]) == asdict(
        CompletionOutput(0, "", [], None, None, "error", None)
    )
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("3", "text", [1, 2])
    assert (output.finished, output.error, output.num_cached_tokens) == (True, "why", None)


@pytest.mark.parametrize(
    ("errors", "raised", "logged"),
    [
        ([], None, None),
        ([None], None, None),
        (["a"], "^a$", None),
        (["a", "b"], "^all 2 prompts are refused: prompt 0: a; prompt 1: b$", None),
        ([*"abcd"], r"^all 4 prompts are refused: prompt 0: a; .* prompt 2: c; \.\.\.$", None),
        ([None, "b"], None, "1 of 2 prompts are refused: prompt 1: b"),
        (["", None], None, "1 of 2 prompts are refused: prompt 0: "),
        (
            [*"abcd", None], None,
            "4 of 5 prompts are refused: prompt 0: a; prompt 1: b; prompt 2: c; ...",
        ),
    ],
)  # fmt: skip
def test_refusals_are_raised_or_logged(
    errors: list[str | None], raised: str | None, logged: str | None, caplog: Any
) -> None:
    outputs = [PoolingRequestOutput(str(at), None, [], error=e) for at, e in enumerate(errors)]
    if raised is not None:
        with pytest.raises(ValueError, match=raised):
            report_refused(outputs)
    else:
        report_refused(outputs)
    assert [record.getMessage() for record in caplog.records] == (
        [] if logged is None else [logged]
    )


def test_lengths_of_results() -> None:
    assert EmbeddingOutput([1.0, 2.0, 3.0]).hidden_size == 3
    assert ClassificationOutput([0.5, 0.5]).num_classes == 2
    pooled = PoolingRequestOutput("0", None, [1])
    assert (pooled.num_cached_tokens, pooled.finished, pooled.error) == (0, True, None)

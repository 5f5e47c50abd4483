"""Pooling prompts: checking them, batching them, and reading the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.nn import functional as F

from vllm_module.base.messages import shorten
from vllm_module.config import EngineConfig
from vllm_module.errors import UnsupportedModelError
from vllm_module.runtime.metrics import progress
from vllm_module.runtime.outputs import PoolingOutput, PoolingRequestOutput
from vllm_module.runtime.pooling.embedding import EmbeddingInputs, Pooling
from vllm_module.runtime.pooling.sentence_config import SentenceConfig
from vllm_module.runtime.pooling_params import PoolingParams
from vllm_module.runtime.sampling.row import check_tokens
from vllm_module.runtime.text.prompts import (
    Prompt,
    Tokenization,
    as_list,
    report_refused,
    token_ids,
)
from vllm_module.runtime.text.tokenizer import Tokenizer

PoolingTask = Literal["embed", "classify", "token_embed"]
Pooled = PoolingRequestOutput[PoolingOutput]


@dataclass(frozen=True)
class Pair:
    """Two texts that a cross-encoder compares."""

    first: str
    second: str


@dataclass
class _Accepted:
    """A prompt to compute, and the output that gets its result."""

    output: Pooled
    types: list[int]
    params: PoolingParams


class Pooler:
    """Turns prompts into vectors, in batches of prompts of similar length.

    Args:
        execute: function that computes a batch on every rank; returns ``[sequences, numbers]``.
        folder: the checkpoint's, with the files of sentence-transformers if it has any.
        config: config.json.
        max_model_len: largest number of tokens of a sequence.
        engine_config: settings with the largest numbers of sequences and tokens in a batch.
        get_tokenizer: function that raises ``CheckpointFormatError`` if there is none.
        activation: function from logits of classes to scores; ``None`` for a model without a head.

    """

    def __init__(
        self,
        execute: Callable[[EmbeddingInputs], torch.Tensor],
        folder: Path,
        config: Any,
        max_model_len: int,
        engine_config: EngineConfig,
        get_tokenizer: Callable[[], Tokenizer],
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._execute = execute
        self._config = config
        self._max_num_seqs = engine_config.max_num_seqs
        self._max_num_batched_tokens = engine_config.max_num_batched_tokens
        self._get_tokenizer = get_tokenizer
        self.activation = activation
        self._sentences = SentenceConfig.read(folder)
        self.max_length = min(max_model_len, self._sentences.max_length or max_model_len)

    def pool(
        self,
        prompts: Sequence[Prompt | Pair],
        task: PoolingTask = "embed",
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling: Pooling | None = None,
        truncate: bool = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[Pooled]:
        """Return the result of ``task`` for each prompt, in their order.

        It is an embedding ``[hidden_size]``, scores ``[labels]``, or ``[tokens, hidden_size]``. The
        other arguments and the errors are those of :meth:`~vllm_module.LLM.embed`.
        """
        how: Any = {"classify": "classes", "token_embed": "tokens"}.get(task)
        if how is None:
            how = self._pooling(pooling)
        given = self._params(params, len(prompts))
        tokenization = Tokenization.of(
            tokenization_kwargs, self.max_length, lower=self._sentences.lower_case
        )
        if truncate and tokenization.most is None:
            tokenization = replace(tokenization, most=self.max_length)
        outputs: list[Pooled] = []
        accepted: list[_Accepted] = []
        for number, (prompt, each) in enumerate(zip(prompts, given, strict=True)):
            output: Pooled = PoolingRequestOutput(str(number), PoolingOutput(torch.empty(0)), [])
            outputs.append(output)
            try:
                accepted.append(_Accepted(output, self._accept(output, prompt, tokenization), each))
            except ValueError as error:
                output.error = str(error)
        report_refused(outputs)
        refused = len(outputs) - len(accepted)
        with progress(use_tqdm, len(outputs), "prompts", refused) as count:
            for batch in self._batches(accepted):
                self._compute(batch, how)
                count(len(batch))
        return outputs

    def _compute(self, batch: list[_Accepted], how: Any) -> None:
        """Compute a batch and set the data or the error of each output."""
        ids = [token for each in batch for token in each.output.prompt_token_ids]
        lengths = [len(each.output.prompt_token_ids) for each in batch]
        types = [number for each in batch for number in each.types]
        found = self._execute(EmbeddingInputs(ids, lengths, how, types if any(types) else [])).cpu()
        rows = torch.split(found, lengths) if how == "tokens" else found.unbind(0)
        for each, row in zip(batch, rows, strict=True):
            if not bool(row.isfinite().all()):
                each.output.error = "its result contains NaN or infinity: check the model's weights"
                continue
            each.output.outputs.data = self._finished(row, how, each.params)

    def _finished(self, row: torch.Tensor, how: Any, params: PoolingParams) -> torch.Tensor:
        wanted = params.use_activation is not False
        if how == "classes":
            assert self.activation is not None, "as the caller made sure"
            return self.activation(row) if wanted else row
        row = row[..., : params.dimensions]
        return F.normalize(row, dim=-1) if wanted else row

    def _params(
        self, params: PoolingParams | Sequence[PoolingParams] | None, count: int
    ) -> list[PoolingParams]:
        if params is None or isinstance(params, PoolingParams):
            given = [params or PoolingParams()] * count
        else:
            given = as_list(params, "pooling_params")
        if len(given) != count:
            raise ValueError(f"there are {len(given)} pooling_params for {count} prompts")
        for each in given:
            if not isinstance(each, PoolingParams):
                raise ValueError(f"pooling_params should be PoolingParams, got {shorten(each)}")
            self._check_dimensions(each.dimensions)
        return given

    def _check_dimensions(self, wanted: int | None) -> None:
        """Raise ``ValueError`` for a length that the model's embeddings were not trained for."""
        known = getattr(self._config, "matryoshka_dimensions", None)
        may = getattr(self._config, "is_matryoshka", False) is True or bool(known)
        size = self._config.hidden_size
        if wanted is not None and (not may or wanted > size or (known and wanted not in known)):
            sizes = f"one of {known}" if known else f"at most {size}"
            reason = sizes if may else "left out: config.json says of no matryoshka dimensions"
            raise ValueError(f"dimensions should be {reason}, got {wanted}")

    def _pooling(self, given: Pooling | None) -> Pooling:
        if given is not None and given not in get_args(Pooling):
            raise ValueError(
                f"pooling should be 'cls', 'mean', 'last' or None, got {shorten(given)}"
            )
        pooling = given or self._sentences.pooling
        if pooling is None:
            raise UnsupportedModelError(
                f"{self._sentences.problem}, which is not implemented: state a pooling that fits "
                "the model, 'cls', 'mean' or 'last'"
            )
        return pooling

    def _accept(
        self, output: Pooled, prompt: Prompt | Pair, tokenization: Tokenization
    ) -> list[int]:
        """Set the output's tokens and return their types; raise ``ValueError`` to refuse it."""
        types: list[int] = []
        if isinstance(prompt, Pair):
            if not tokenization.special:
                raise ValueError("special tokens separate two texts: add_special_tokens is True")
            texts = tokenization.text(prompt.first), tokenization.text(prompt.second)
            ids, types = self._get_tokenizer().encode_pair(*texts, tokenization.most)
        else:
            if isinstance(prompt, Mapping) and prompt.get("adapter") is not None:
                raise ValueError(
                    f"the prompt asks for the adapter {shorten(prompt['adapter'])}, and encoders "
                    "compute with none: leave it out, or merge_adapter it into the model"
                )
            ids = token_ids(prompt, self._get_tokenizer, tokenization)
        if not ids:
            raise ValueError("the prompt has no tokens")
        check_tokens(ids, self._config.vocab_size)
        output.prompt_token_ids = ids
        if len(ids) > self.max_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the model takes at most {self.max_length}: "
                "shorten it, or give truncate=True to leave out its end"
            )
        return types or [0] * len(ids)

    def _batches(self, accepted: list[_Accepted]) -> Iterator[list[_Accepted]]:
        """Yield batches, the longest prompts first; a batch has at least one prompt."""
        accepted = sorted(accepted, key=lambda each: -len(each.output.prompt_token_ids))
        batch: list[_Accepted] = []
        tokens = 0
        for each in accepted:
            tokens += len(each.output.prompt_token_ids)
            if batch and (
                len(batch) == self._max_num_seqs or tokens > self._max_num_batched_tokens
            ):
                yield batch
                batch, tokens = [], len(each.output.prompt_token_ids)
            batch.append(each)
        if batch:
            yield batch

"""Methods of ``LLM`` for encoders: embeddings, classes, scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch.nn import functional as F

from vllm_module.base.messages import shorten
from vllm_module.build.model_source import ModelSource
from vllm_module.config import EngineConfig
from vllm_module.errors import UnsupportedModelError
from vllm_module.runtime.arguments import REQUEST_ARGUMENTS, check_type, known_arguments
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm_module.runtime.pooling.embedding import Pooling
from vllm_module.runtime.pooling.pooler import Pair, Pooled, Pooler, PoolingTask
from vllm_module.runtime.pooling.sentence_config import classifier_activation
from vllm_module.runtime.pooling_params import PoolingParams
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.text.prompts import Prompt, as_list, as_prompts
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.runtime.warm_up import warm_up_batches

_Params = PoolingParams | Sequence[PoolingParams] | None


class EncoderMethods:
    """The methods of :class:`~vllm_module.LLM` for encoders; ``engine`` has the lock."""

    engine: Engine
    executor: Executor
    source: ModelSource
    no_text: str
    get_tokenizer: Callable[[], Tokenizer]
    _check: Callable[[Literal["generate", "embed"]], None]
    _pooler: Pooler | None

    def _make_pooler(self, config: EngineConfig, length: int) -> Pooler:
        """Return what embeds up to ``length`` tokens, after a warm-up on a GPU."""
        hf_config, worker = self.source.config, self.executor.worker
        self.no_text = (
            f"{hf_config.architectures[0]} is an encoder and generates no text: "
            "LLM.embed returns embeddings of prompts"
        )
        pooler = Pooler(
            self.executor.embed,
            self.source.folder,
            hf_config,
            length,
            config,
            self.get_tokenizer,
            classifier_activation(hf_config) if hasattr(worker.model, "classify") else None,
        )
        if worker.device.type == "cuda":
            tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
            for inputs in warm_up_batches(tokens, sequences, length):
                self.executor.embed(inputs)
        return pooler

    def _check_encoder(self) -> Pooler:
        self._check("embed")
        assert self._pooler is not None, "as _check made sure"
        return self._pooler

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = True,
        pooling: Pooling | None = None,
        truncate: bool = False,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: _Params = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding for each prompt, in their order; the model must be an encoder.

        Args:
            prompts: as for :meth:`~vllm_module.LLM.generate`.
            normalize: True to divide each embedding by its Euclidean norm.
            pooling: ``"cls"`` for the first token's hidden state, ``"last"`` for the last one's,
                ``"mean"`` for the mean. By default, the pooling that the files of
                sentence-transformers in the checkpoint name, or the mean without such files.
            truncate: True to drop the end of a prompt that is too long, keeping a text's special
                tokens; otherwise the prompt is refused.
            use_tqdm: True to draw a progress bar on standard error; or a callable such as ``tqdm``.
            pooling_params: vLLM's object with ``normalize`` and the length of embeddings.
            tokenization_kwargs: as for :meth:`~vllm_module.LLM.generate`.
            options: other arguments of vLLM, with the values that change nothing.

        A prompt that is refused, or whose embedding is not finite, has an ``error`` in its output;
        the others are not affected.

        Raises:
            UnsupportedModelError: the model generates text, or the checkpoint asks for a pooling
                that is not implemented.

        Otherwise as :meth:`~vllm_module.LLM.generate`.

        """
        known_arguments("LLM.embed", options, (), REQUEST_ARGUMENTS)
        check_type("normalize", normalize, "True or False", bool)
        if pooling_params is None:
            pooling_params = PoolingParams(use_activation=normalize)
        elif not normalize:
            raise ValueError("give use_activation=False of pooling_params, and not normalize")
        pooled = self._pool(
            as_prompts(prompts),
            "embed",
            pooling_params,
            pooling=pooling,
            truncate=truncate,
            use_tqdm=use_tqdm,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [
            each.with_outputs(EmbeddingRequestOutput, EmbeddingOutput(each.outputs.data.tolist()))
            for each in pooled
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: _Params = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate: bool = False,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Pooled]:
        """Return a tensor for each prompt, in their order.

        Args:
            prompts, truncate, use_tqdm, tokenization_kwargs, options: as for :meth:`embed`.
            pooling_params: length of the vectors, and whether they are divided by their norm.
            pooling_task: ``"embed"`` for the embedding ``[hidden_size]``, ``"token_embed"`` for one
                of each token ``[tokens, hidden_size]``, ``"classify"`` for the classes'
                probabilities ``[labels]``, or their logits without activation. By default
                ``"classify"`` for a model with a head, else ``"embed"``.

        Raises what :meth:`embed` raises.

        """
        known_arguments("LLM.encode", options, (), REQUEST_ARGUMENTS)
        if pooling_task is None:
            pooling_task = "embed" if self._check_encoder().activation is None else "classify"
        if pooling_task not in get_args(PoolingTask):
            raise ValueError(
                "pooling_task should be 'embed', 'token_embed' or 'classify', got "
                f"{shorten(pooling_task)}"
            )
        return self._pool(
            as_prompts(prompts),
            pooling_task,
            pooling_params,
            truncate=truncate,
            use_tqdm=use_tqdm,
            tokenization_kwargs=tokenization_kwargs,
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: _Params = None,
        truncate: bool = False,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's classes, in the order of the prompts.

        The model must be an encoder with a head. config.json names the function from logits to
        probabilities: by default the softmax, or the sigmoid for one class.

        Arguments and errors are those of :meth:`embed`.
        """
        known_arguments("LLM.classify", options, (), REQUEST_ARGUMENTS)
        pooled = self._pool(
            as_prompts(prompts),
            "classify",
            pooling_params,
            truncate=truncate,
            use_tqdm=use_tqdm,
            tokenization_kwargs=tokenization_kwargs,
        )
        cls, made = ClassificationRequestOutput, ClassificationOutput
        return [each.with_outputs(cls, made(each.outputs.data.tolist())) for each in pooled]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate: bool = False,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Return scores of pairs of texts: one with each of several, or two equally long lists.

        An encoder with a head of one class reads both texts of a pair together (a cross-encoder).
        For one without a head, the score is the cosine similarity of the embeddings.

        Args:
            data_1: one text, or as many as ``data_2`` has.
            data_2: one text or several.
            pooling_params, truncate, use_tqdm, tokenization_kwargs, options: as for :meth:`embed`.

        Raises:
            UnsupportedModelError: the model generates text, or its head has several classes.
            ValueError: ``data_1`` has neither one text nor as many as ``data_2``, or all are
                refused.

        """
        known_arguments("LLM.score", options, (), REQUEST_ARGUMENTS)
        firsts, seconds = as_list(data_1, "data_1"), as_list(data_2, "data_2")
        for text in (*firsts, *seconds):
            check_type("a text to score", text, "text", str)
        if len(firsts) not in (1, len(seconds)) or not seconds:
            raise ValueError(
                f"data_1 should have one text or as many as data_2, which has {len(seconds)}: it "
                f"has {len(firsts)}"
            )
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        how: dict[str, Any] = {
            "truncate": truncate,
            "use_tqdm": use_tqdm,
            "tokenization_kwargs": tokenization_kwargs,
        }
        if self._check_encoder().activation is None:
            return self._compare(firsts, seconds, pooling_params, how)
        pairs = [Pair(*each) for each in zip(firsts, seconds, strict=True)]
        pooled = self._pool(pairs, "classify", pooling_params, **how)
        sizes = {each.outputs.data.numel() for each in pooled if each.error is None}
        if sizes - {1}:
            raise UnsupportedModelError(
                f"the model has {max(sizes)} classes, and a score needs one: use classify"
            )
        scores = [float("nan") if each.error else each.outputs.data.item() for each in pooled]
        return [
            each.with_outputs(ScoringRequestOutput, ScoringOutput(score))
            for each, score in zip(pooled, scores, strict=True)
        ]

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[RerankResult]:
        """Return documents with their scores for a query, the best first.

        Args:
            query: the text to compare with.
            documents: texts.
            top_n: number of documents returned; ``None`` for all.
            options: arguments of :meth:`score`.

        Raises what :meth:`score` raises, and ``ValueError`` if one document is refused.

        """
        check_type("top_n", top_n, "an integer from 0, or None", int, type(None))
        if top_n is not None and top_n < 0:
            raise ValueError(f"top_n should be an integer from 0, or None, got {top_n}")
        documents = as_list(documents, "documents")
        scores = self.score(query, documents, **options)
        for number, each in enumerate(scores):
            if each.error is not None:
                raise ValueError(f"document {number}: {each.error}")
        found = [
            RerankResult(number, document, each.outputs.score)
            for number, (document, each) in enumerate(zip(documents, scores, strict=True))
        ]
        return sorted(found, key=lambda each: -each.relevance_score)[:top_n]

    def _compare(
        self,
        firsts: list[str],
        seconds: list[str],
        params: PoolingParams | None,
        how: Mapping[str, Any],
    ) -> list[ScoringRequestOutput]:
        """Return cosine similarities of texts' embeddings; each text is embedded once."""
        texts = list(dict.fromkeys((*firsts, *seconds)))
        pooled = dict(zip(texts, self._pool(texts, "embed", params, **how), strict=True))
        outputs = []
        for number, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            pair = pooled[first], pooled[second]
            error = pair[0].error or pair[1].error
            one, other = (each.outputs.data for each in pair)
            score = float("nan") if error else F.cosine_similarity(one, other, dim=0).item()
            tokens = pair[0].prompt_token_ids + pair[1].prompt_token_ids
            outputs.append(
                ScoringRequestOutput(str(number), ScoringOutput(score), tokens, error=error)
            )
        return outputs

    def _pool(
        self,
        prompts: Sequence[Prompt | Pair],
        task: PoolingTask,
        params: _Params,
        *,
        truncate: bool,
        **how: Any,
    ) -> list[Pooled]:
        check_type("truncate", truncate, "True or False", bool)
        with self.engine.alone(), torch.inference_mode():
            pooler = self._check_encoder()
            if task == "classify" and pooler.activation is None:
                raise UnsupportedModelError(
                    "the model has no head that gives classes: load one such as "
                    "BertForSequenceClassification, or use embed"
                )
            if task == "embed" and pooler.activation is not None:
                raise UnsupportedModelError(
                    "the model was trained to classify, and its hidden states are no embeddings: "
                    "use classify or score"
                )
            return pooler.pool(prompts, task, params, truncate=truncate, **how)

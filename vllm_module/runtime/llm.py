from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from vllm_module.config import (
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    LoadFormat,
    ModelConfig,
    ModelImpl,
)
from vllm_module.errors import CheckpointFormatError, ModelNotReadyError, UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.messages import shorten
from vllm_module.runtime.arguments import (
    LLM_ARGUMENTS,
    REQUEST_ARGUMENTS,
    check_type,
    known_arguments,
)
from vllm_module.runtime.beam_search import BeamSearchOutput, BeamSearchParams, search
from vllm_module.runtime.chat import ChatTemplate, ContentFormat, Messages, template_text
from vllm_module.runtime.classifier_config import classifier_activation
from vllm_module.runtime.code_tokenizer import read_tokenizer
from vllm_module.runtime.encoder_methods import EncoderMethods
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.executor import Executor
from vllm_module.runtime.generation_config import default_sampling_params
from vllm_module.runtime.metrics import Metric, engine_metrics
from vllm_module.runtime.outputs import RequestOutput, decode_logprobs, request_output
from vllm_module.runtime.page_pool import PagePool
from vllm_module.runtime.pooler import Pooler
from vllm_module.runtime.prompts import (
    Prompt,
    as_list,
    as_prompts,
    cache_salt,
    encoder,
    prompt_text,
    refused,
    report_refused,
    token_ids,
)
from vllm_module.runtime.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.template_process import TemplateProcess
from vllm_module.runtime.tokenizer import Tokenizer, stop_tokens
from vllm_module.runtime.warm_up import warm_up_batches
from vllm_module.runtime.weight_methods import WeightMethods
from vllm_module.summary import Summarized, mebibytes
from vllm_module.weights import resolve
from vllm_module.weights.regular_file import is_there

_log = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None

MAX_MODEL_LEN = 8192  # tokens of a sequence, if neither the model nor the caller sets a limit
_DTYPES: dict[Any, str] = {"half": "float16", "float": "float32"}  # vLLM's other names
_CLOSE_TIMEOUT = 30.0  # seconds that close() waits for a step to end


@dataclass(frozen=True)
class ServedModelConfig:
    """What a model is and how it is served, by vLLM's names.

    Attributes:
        model, revision, trust_remote_code, seed: as they were given.
        tokenizer: where it is read.
        dtype: of the parameters.
        max_model_len: most tokens of a sequence.
        hf_config: config.json, with its entries as attributes.

    """

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    hf_config: HFConfig
    revision: str | None
    trust_remote_code: bool
    seed: int | None

    def get_vocab_size(self) -> int:
        """Return the number of tokens that the model knows."""
        return self.hf_config.vocab_size

    def get_hidden_size(self) -> int:
        """Return the length of a hidden state."""
        return self.hf_config.hidden_size


class LLM(EncoderMethods, WeightMethods, Summarized):
    """A loaded model that turns prompts into text, or an encoder that turns them into vectors.

    ``LLM("folder").generate("Once upon a time")[0].outputs[0].text``

    Args:
        model: a folder, a GGUF file, a hub id or a URL, as in
            :class:`~vllm_module.config.ModelConfig`.
        revision, dtype, quantization, max_model_len, hf_overrides, model_code, download_dir,
            hf_token, enable_expert_parallel, model_impl, trust_remote_code: as in
            :class:`~vllm_module.config.ModelConfig`.
        tokenizer, tokenizer_revision: a folder or hub id with the tokenizer and the chat template,
            instead of the model's.
        skip_tokenizer_init: read no tokenizer; prompts are token ids.
        chat_template: a template, or the path of one, instead of the checkpoint's.
        seed: of requests that have none; ``None`` for random seeds.
        max_logprobs: most ``logprobs`` and ``prompt_logprobs`` of a request; -1 for no limit.
        generation_config: ``"vllm"`` ignores the sampling parameters of generation_config.json,
            ``"auto"`` reads those of the model's, a folder those of its own.
        override_generation_config: entries that replace those of generation_config.json.
        device: a device string of torch, or ``"auto"`` for CUDA if there is one.
        load_format: the format of the weights, instead of that of ``load_config``.
        load_config: how weights are loaded.
        engine: entries of :class:`~vllm_module.config.EngineConfig`, such as
            ``tensor_parallel_size``, ``kv_cache_dtype`` and ``gpu_memory_utilization``. Other
            arguments of vLLM are accepted with the values that change nothing.
            ``enable_prefix_caching`` is automatic: on, unless layers keep a state of each sequence
            (Mamba-2, Qwen3-Next, hybrids). There, ``True`` takes twice the memory for states.

    A ``tensor_parallel_size`` above 1 starts more processes on this host. They end with
    :meth:`close`, with the ``with`` block, or with this process. Under torchrun, its processes are
    the ranks: rank 0 returns from the constructor, and the others run the model inside it until
    rank 0 closes the engine, then exit. Threads may share an ``LLM``; their requests are batched.

    Attributes:
        source: the :class:`~vllm_module.model_source.ModelSource`: folder, configuration, dtype.
        tokenizer: of the checkpoint; ``None`` if it has none that can be read.
        no_tokenizer: why there is no tokenizer.
        no_chat_template: why there is no chat template.
        no_text: why the model generates no text; empty if it does.
        model_config: what the model is and how it is served, by vLLM's names.

    Raises:
        WeightLoadError: the checkpoint is refused.
        ValueError: a setting is invalid or unknown, or there are fewer devices than ranks.

    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str | torch.dtype = "auto",
        quantization: Any = None,
        max_model_len: int | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        model_code: str | Path | None = None,
        download_dir: str | None = None,
        hf_token: str | bool | None = None,
        enable_expert_parallel: bool = False,
        model_impl: ModelImpl = "auto",
        trust_remote_code: bool = False,
        tokenizer: str | None = None,
        tokenizer_revision: str | None = None,
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        seed: int | None = 0,
        max_logprobs: int = 20,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        device: str = "auto",
        load_format: LoadFormat | None = None,
        load_config: LoadConfig | None = None,
        **engine: Any,
    ) -> None:
        begin = time.monotonic()
        # With the arguments above, which a name may be close to.
        own = (EngineConfig.model_fields.keys() | LLM.__init__.__annotations__) - {
            "engine",
            "return",
        }
        engine = known_arguments("LLM", engine, own, LLM_ARGUMENTS)
        engine = {name: value for name, value in engine.items() if value is not None}
        check_type("generation_config", generation_config, "'auto', 'vllm' or a folder", str, Path)
        own_generation_config = str(generation_config) not in ("auto", "vllm")
        if own_generation_config and not is_there(
            Path(generation_config, "generation_config.json")
        ):
            raise ValueError(
                "generation_config should be 'auto', for the model's own file, 'vllm', for none, "
                "or a folder that has a generation_config.json, and is "
                f"{shorten(generation_config)}"
            )
        override = override_generation_config or {}
        check_type("override_generation_config", override, "a mapping or None", Mapping)
        check_type("seed", seed, "an integer or None", int, type(None))
        check_type("max_logprobs", max_logprobs, "an integer from -1", int)
        if max_logprobs < -1:
            raise ValueError(f"max_logprobs should be an integer from -1, got {max_logprobs}")
        check_type("skip_tokenizer_init", skip_tokenizer_init, "True or False", bool)
        entries: dict[str, Any] = {
            "model": str(model),
            "revision": revision,
            "dtype": _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype,
            "quantization": quantization,
            "max_model_len": max_model_len,
            "hf_overrides": {} if hf_overrides is None else hf_overrides,
            "model_code": model_code,
            "download_dir": None if download_dir is None else str(download_dir),
            "hf_token": hf_token,
            "enable_expert_parallel": enable_expert_parallel,
            "model_impl": model_impl,
            "trust_remote_code": trust_remote_code,
        }
        self.tokenizer: Tokenizer | None = None
        self.no_tokenizer = "skip_tokenizer_init is set" if skip_tokenizer_init else ""
        self.no_chat_template = ""
        self.no_text = ""
        self._template: ChatTemplate | None = None
        self._templates = TemplateProcess()
        self._max_logprobs = max_logprobs
        self._trusts_code = trust_remote_code
        self._seeds = None if seed is None else random.Random(seed)
        model_config = ModelConfig(**entries)
        config = EngineConfig(**engine)
        text_folder: Path | None = None
        if tokenizer is not None:
            hub: dict[str, Any] = {"download_dir": model_config.download_dir, "token": hf_token}
            text_folder = resolve(
                str(tokenizer), tokenizer_revision, weights=False, code=trust_remote_code, **hub
            )
        loading = LoadConfig() if load_config is None else LoadConfig.model_validate(load_config)
        if load_format is not None:
            loading = LoadConfig(**{**loading.model_dump(), "load_format": load_format})
        self.executor = Executor(
            model_config,
            loading,
            DeviceConfig(device=device),
            config,
        )
        if self.executor.rank > 0:
            self.executor.follow()
            raise SystemExit(0)
        try:
            self.source = self.executor.worker.source
            self._read_tokenizer(text_folder or self.source.folder, chat_template)
            if self.no_tokenizer and text_folder is not None and not skip_tokenizer_init:
                raise CheckpointFormatError(self.no_tokenizer)
            folder = Path(generation_config) if own_generation_config else self.source.folder
            read = None if generation_config == "vllm" else folder
            self._defaults = default_sampling_params(read, override)
            ends = stop_tokens(self.source.folder, folder, override)
            self._prepare(config, ends)
            self.model_config = ServedModelConfig(
                model_config.model,
                str(tokenizer or model_config.model),
                self.source.dtype,
                self.engine.max_model_len,
                self.source.config,
                model_config.revision,
                model_config.trust_remote_code,
                seed,
            )
        except BaseException:
            self.close()
            raise
        facts = "; ".join(f"{name}: {value}" for name, value in self._facts()[:-1])
        _log.info("loaded in %.1f s: %s", time.monotonic() - begin, facts)

    def _read_tokenizer(self, folder: Path, template: str | Path | None) -> None:
        """Read the tokenizer and the chat template, or the reasons why there are none."""
        try:
            if not self.no_tokenizer:
                self.tokenizer = read_tokenizer(folder, self._trusts_code)
        except CheckpointFormatError as error:
            self.no_tokenizer = str(error)
        try:
            given = None if template is None else template_text(template)
            self._template = ChatTemplate(folder, given, self._templates)
        except CheckpointFormatError as error:
            self.no_chat_template = str(error)

    def _prepare(self, config: EngineConfig, end_tokens: set[int]) -> None:
        hf_config = self.source.config
        length = hf_config.max_model_len or MAX_MODEL_LEN
        worker, size = self.executor.worker, config.block_size
        on_gpu = worker.device.type == "cuda"
        # An encoder has no cache. Its engine takes no requests; embeddings use the engine's lock.
        pages, host_pages = (0, 0) if worker.is_encoder else self.executor.start(length)
        scheduler = Scheduler(
            PagePool(pages, size),
            PagePool(host_pages, size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            worker.caches_prefixes,
            worker.window,
            has_states=worker.state_bytes > 0,
            host_states=worker.host_states,
        )
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        self.engine = Engine(
            self.executor.run,
            scheduler,
            hf_config.vocab_size,
            length,
            self.tokenizer,
            end_tokens | ({eos} if eos is not None else set()),
            eos,
            repeatable=self.executor.size == 1,
            wait=self.executor.wait,
            async_scheduling=on_gpu if config.async_scheduling is None else config.async_scheduling,
            stream=torch.cuda.current_stream(worker.device) if on_gpu else None,
        )
        self._ids = itertools.count()
        self._pooler = None
        if worker.is_encoder:
            self.no_text = (
                f"{hf_config.architectures[0]} is an encoder and generates no text: "
                "LLM.embed returns embeddings of prompts"
            )
            has_head = hasattr(worker.model, "classify")
            self._pooler = Pooler(
                self.executor.embed,
                self.source.folder,
                hf_config,
                length,
                config,
                self.get_tokenizer,
                classifier_activation(hf_config) if has_head else None,
            )
            if on_gpu:
                tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
                for inputs in warm_up_batches(tokens, sequences, length):
                    self.executor.embed(inputs)

    def _facts(self) -> list[tuple[str, str]]:
        if not hasattr(self, "engine"):
            return [("state", "not loaded")]
        worker, pool = self.executor.worker, self.engine.scheduler.pool
        tensors = (*worker.model.parameters(), *worker.model.buffers())
        weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = str(self.source.dtype).removeprefix("torch.")
        cache = "none"
        if pool.num_pages:
            cache = (
                f"{pool.num_pages} pages of {pool.page_size} tokens, {self.engine.cache_tokens} in "
                f"all, {mebibytes(pool.num_pages * worker.page_bytes)}"
            )
        if worker.state_bytes:
            states = worker.num_states * worker.state_bytes
            cache += f"; {worker.describe_states()}, {mebibytes(states)}"
        state = self.engine.refusal or "ready"
        return [
            ("model", self.source.name),
            ("architecture", f"{self.source.config.architectures[0]}, {dtype}"),
            ("device", f"{worker.device}, ranks: {self.executor.size}"),
            ("weights of a rank", mebibytes(weights)),
            ("cache of a rank", cache),
            ("sequences", f"at most {self.engine.max_model_len} tokens"),
            ("state", state),
        ]

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """Make an engine of :class:`~vllm_module.EngineArgs`."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ``CheckpointFormatError`` if there is none."""
        if self.tokenizer is None:
            raise CheckpointFormatError(self.no_tokenizer)
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none, from generation_config.json.

        Its ``model_fields_set`` names the parameters that the file has.
        """
        return self._defaults.clone()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue prompts in one batch, and return an output for each, in their order.

        Args:
            prompts: text, a list of token ids, :class:`TextPrompt`, :class:`TokensPrompt`, or a
                sequence of these. A ``cache_salt`` of a prompt keeps its cached pages from prompts
                with another one.
            sampling_params: one for all prompts, or a sequence with one for each prompt; without,
                :meth:`get_default_sampling_params`.
            use_tqdm: draw a progress bar on standard error.
            tokenization_kwargs: ``add_special_tokens``, or ``truncation`` and ``max_length``, for
                prompts that are text.
            options: others of vLLM, with the values that change nothing.

        A prompt that is refused has an ``error`` in its output, and the others are not affected;
        if it is the only one, that is raised.

        Raises:
            ValueError: every prompt is refused, ``prompts`` is of another type, or the number of
                sampling parameters is not the number of prompts.
            ModelNotReadyError: the engine sleeps, or an update of the weights failed.
            RankError: a rank ended, hangs or failed, now or before; it is named.
            RuntimeError: a step failed, or the engine was closed. Requests of other threads in that
                step get the reason as their ``error``.

        """
        known_arguments("LLM.generate", options, (), REQUEST_ARGUMENTS)
        encode = encoder(self.get_tokenizer, tokenization_kwargs)
        return self._generate(as_prompts(prompts), sampling_params, use_tqdm, encode)

    def _generate(
        self,
        prompts: Sequence[Prompt | ValueError],
        sampling_params: Params,
        use_tqdm: bool,
        encode: Callable[[str], list[int]] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; one that is an error is refused with it."""
        self._check("generate")
        params_list = self._params(sampling_params, len(prompts))
        requests: list[Request | RequestOutput] = []
        try:
            for prompt, params in zip(prompts, params_list, strict=True):
                requests.append(self._add(prompt, params, encode))
            report_refused(requests)
        except BaseException:
            self._abort(requests)
            raise
        self._run(requests, use_tqdm)
        return [self._output(each) if isinstance(each, Request) else each for each in requests]

    def _run(self, requests: Sequence[Request | RequestOutput], use_tqdm: bool = False) -> None:
        """Step until all requests have ended; abort them if that raises."""
        running = {each.request_id for each in requests if isinstance(each, Request)}
        bar = None
        if use_tqdm:
            from tqdm.auto import tqdm

            bar = tqdm(total=len(requests), initial=len(requests) - len(running), desc="prompts")
        try:
            while running:
                self.engine.step()
                for request_id in [each for each in running if each not in self.engine.requests]:
                    running.discard(request_id)
                    if bar is not None:
                        bar.update()
        finally:
            self._abort(requests)
            if bar is not None:
                bar.close()

    def _abort(self, requests: Sequence[Request | RequestOutput]) -> None:
        for each in requests:
            if isinstance(each, Request):
                self.engine.abort(each.request_id)  # does nothing for a finished request

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: ContentFormat = "auto",
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one or more conversations, formatted by the checkpoint's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a sequence of such lists.
            sampling_params, use_tqdm: as for :meth:`generate`.
            chat_template: a template to use instead of the checkpoint's.
            add_generation_prompt: end the prompt with the beginning of the assistant's message.
            continue_final_message: have the last message continued, instead of a new one begun;
                then ``add_generation_prompt`` has to be ``False``.
            tools: descriptions of tools, in the form that the template expects.
            chat_template_kwargs: other variables of the template, such as ``enable_thinking``.
            chat_template_content_format: what the template gets as content: ``"string"``,
                ``"openai"`` (a list of parts), or by default what it shows.
            options: others of vLLM, with the values that change nothing.

        Raises:
            CheckpointFormatError: the checkpoint has no chat template, or no tokenizer.
            ValueError: the template refuses all messages, or does not read a variable.

        Otherwise as :meth:`generate`: a conversation that is refused has an ``error``.

        """
        self._check("generate")
        known_arguments("LLM.chat", options, (), REQUEST_ARGUMENTS)
        items = as_list(messages, "messages")
        is_one = any(isinstance(each, Mapping) for each in items)
        conversations = [items] if is_one else items
        variables: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if tools is not None:
            variables["tools"] = tools
        if chat_template_kwargs is not None:
            expected = "a mapping of variables or None"
            check_type("chat_template_kwargs", chat_template_kwargs, expected, Mapping)
            variables |= chat_template_kwargs
        if chat_template_content_format not in get_args(ContentFormat):
            raise ValueError(
                "chat_template_content_format should be 'auto', 'string' or 'openai', got "
                f"{shorten(chat_template_content_format)}"
            )
        variables["content_format"] = chat_template_content_format
        template = self._chat_template(chat_template)
        prompts: list[Prompt | ValueError] = []
        for conversation in conversations:
            try:
                prompts.append(self._chat_prompt(template, conversation, variables))
            except CheckpointFormatError:
                raise
            except ValueError as error:
                prompts.append(error)
        return self._generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: Messages, chat_template: str | None = None, /, **variables: Any
    ) -> dict[str, Any]:
        """Format a conversation as a prompt for :meth:`generate` or :meth:`stream`.

        ``variables`` are those of the template. Raises what :meth:`chat` raises.
        """
        return self._chat_prompt(self._chat_template(chat_template), messages, variables)

    def _chat_template(self, given: str | None) -> ChatTemplate:
        check_type("chat_template", given, "text or None", str, type(None))
        if given is not None:
            return ChatTemplate(self.source.folder, given, self._templates)
        if self._template is None:
            raise CheckpointFormatError(self.no_chat_template)
        return self._template

    def _chat_prompt(
        self, template: ChatTemplate, messages: Messages, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        text = template.render(messages, **variables)
        # The template has written the special tokens.
        return {"prompt": text, "prompt_token_ids": self.get_tokenizer().encode(text, False)}

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue a prompt, and yield the whole output so far after each new token.

        Each step computes all requests, so several streams can be read alternately. Closing or
        dropping the iterator aborts the request.

        Raises, at ``next()``, what :meth:`generate` raises.
        """
        self._check("generate")
        (params,) = self._params(sampling_params, 1)
        request = self._add(prompt, params, streamed=True)
        if isinstance(request, RequestOutput):
            raise ValueError(request.error)
        yielded = len(request.prompt_token_ids)
        try:
            while True:
                # A step for another stream may have computed tokens of this one, or ended it. With
                # the lock, no other thread's step adds one between the count and the output.
                with self.engine.reading():
                    count = sum(len(sequence.tokens) for sequence in request.sequences)
                    is_new = request.finished or count > yielded
                    output = self._output(request) if is_new else None
                if output is None:
                    self.engine.step()
                    continue
                yielded = count
                yield output
                if output.finished:
                    return
        finally:
            self.engine.abort(request.request_id)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        **options: Any,
    ) -> list[BeamSearchOutput]:
        """Return the most probable continuations of each prompt that a search of beams finds.

        Args:
            prompts: as for :meth:`generate`.
            params: of the search.
            use_tqdm: draw a progress bar on standard error.
            options: others of vLLM, with the values that change nothing.

        Raises what :meth:`generate` raises, and ``ValueError`` if one prompt is refused.

        """
        known_arguments("LLM.beam_search", options, (), REQUEST_ARGUMENTS)
        self._check("generate")
        encode = encoder(self.get_tokenizer, None)
        starts = [token_ids(prompt, encode) for prompt in as_prompts(prompts)]
        ends = self.engine.stop_token_ids
        found = search(self._next_logprobs, starts, params, ends, use_tqdm)
        for sequence in itertools.chain.from_iterable(each.sequences for each in found):
            if self.tokenizer is not None:
                text = self.tokenizer.decode(sequence.tokens, params.skip_special_tokens)
                sequence.text = text
        return found

    def _next_logprobs(self, sequences: list[list[int]], count: int) -> list[dict[int, Logprob]]:
        """Return the logprobs of ``count`` most probable tokens after each sequence."""
        params = SamplingParams(max_tokens=1, logprobs=count, temperature=0, detokenize=False)
        requests = [self.engine.add(str(next(self._ids)), each, params) for each in sequences]
        self._run(requests)
        for request in requests:
            if request.error is not None:
                raise RuntimeError(request.error)
        return [request.sequences[0].logprobs[0] for request in requests]

    def get_metrics(self) -> list[Metric]:
        """Return what the engine has done so far and does now, by vLLM's names."""
        with self.engine.reading():
            scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
            totals = replace(self.engine.totals, preemptions=scheduler.preemptions)
            used = 1 - pool.free_pages / pool.num_pages if pool.num_pages else 0.0
            return engine_metrics(
                totals,
                {"model_name": self.source.name},
                num_requests_running=len(scheduler.running),
                num_requests_waiting=len(scheduler.waiting),
                kv_cache_usage_perc=used,
            )

    def close(self) -> None:
        """End the other ranks and free the KV cache. May be called more than once."""
        engine: Engine | None = getattr(self, "engine", None)  # none if the constructor failed
        if engine is not None and engine.is_fork:
            return
        locked = False
        try:
            locked = engine is not None and engine.lock.acquire(timeout=_CLOSE_TIMEOUT)
        finally:  # an interrupt ends only the wait for a step
            try:
                self._templates.close()
                self.executor.close()
                if engine is not None and locked:
                    engine.drop()
            finally:
                if engine is not None and locked:
                    engine.lock.release()

    def _check_encoder(self) -> Pooler:
        self._check("embed")
        assert self._pooler is not None, "as _check made sure"
        return self._pooler

    def _check(self, method: Literal["generate", "embed"]) -> None:
        """Raise if no request is served, whatever it is, or if the model is for another method."""
        self.executor.check()
        if method == "generate" and self.no_text:
            raise UnsupportedModelError(self.no_text)
        if method == "embed" and self._pooler is None:
            raise UnsupportedModelError(
                f"{self.source.config.architectures[0]} generates text, and only an encoder such "
                "as BertModel embeds prompts: call generate, or load an encoder"
            )
        if self.engine.refusal is not None:
            raise ModelNotReadyError(f"the engine takes no more requests: {self.engine.refusal}")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        is_one = params is None or isinstance(params, SamplingParams)
        listed: list[Any] = [params] * count if is_one else as_list(params, "sampling_params")
        if len(listed) != count:
            raise ValueError(f"there are {len(listed)} sampling_params for {count} prompts")
        for each in listed:
            if each is not None and not isinstance(each, SamplingParams):
                raise ValueError(f"sampling_params should be SamplingParams, got {shorten(each)}")
        return [each or self._defaults for each in listed]

    def _add(
        self,
        prompt: Prompt | ValueError,
        params: SamplingParams,
        encode: Callable[[str], list[int]] | None = None,
        *,
        streamed: bool = False,
    ) -> Request | RequestOutput:
        """Add a prompt to the engine; return its request, or an output with its ``error``."""
        request_id = str(next(self._ids))
        text = prompt_text(prompt)
        ids: list[int] = []
        try:
            if isinstance(prompt, ValueError):
                raise prompt
            ids = token_ids(prompt, encode or (lambda text: self.get_tokenizer().encode(text)))
            counts = [params.logprobs or 0, params.prompt_logprobs or 0]
            most = self.engine.vocab_size if -1 in counts else max(counts)
            if 0 <= self._max_logprobs < most:
                raise ValueError(
                    f"{most} logprobs are more than max_logprobs={self._max_logprobs}: ask for "
                    "fewer, or give LLM(max_logprobs=-1)"
                )
            if self._seeds is not None and params.seed is None:
                params = params.model_copy(update={"seed": self._seeds.getrandbits(63)})
            salt = cache_salt(prompt)
            return self.engine.add(
                request_id, ids, params, text, streamed=streamed, cache_salt=salt
            )
        except ValueError as error:
            return refused(request_id, text, ids, error)

    def _output(self, request: Request) -> RequestOutput:
        with self.engine.reading():
            output = request_output(request)
        if self.tokenizer is not None and request.params.detokenize:
            decode_logprobs(output, self.tokenizer)
        return output

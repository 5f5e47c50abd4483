from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from vllm_module.messages import describe_error, shorten
from vllm_module.runtime.arguments import LLM_ARGUMENTS, check_type, known_arguments
from vllm_module.runtime.chat import ChatTemplate, ContentFormat, Messages
from vllm_module.runtime.code_tokenizer import read_tokenizer
from vllm_module.runtime.embedder import Embedder
from vllm_module.runtime.embedding import Pooling
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.executor import Executor
from vllm_module.runtime.generation_config import default_sampling_params
from vllm_module.runtime.outputs import (
    EmbeddingRequestOutput,
    RequestOutput,
    decode_logprobs,
    request_output,
)
from vllm_module.runtime.page_pool import PagePool
from vllm_module.runtime.prompts import Prompt, as_list, refused, report_refused, token_ids
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.template_process import TemplateProcess
from vllm_module.runtime.tokenizer import Tokenizer, stop_tokens
from vllm_module.runtime.warm_up import warm_up_batches
from vllm_module.weights import Weight, resolve

_log = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None

MAX_MODEL_LEN = 8192  # tokens of a sequence, if neither the model nor the caller sets a limit
_DTYPES: dict[Any, str] = {"half": "float16", "float": "float32"}  # vLLM's other names
_CLOSE_TIMEOUT = 30.0  # seconds that close() waits for a step to end


class LLM:
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
        seed: of requests that have none; ``None`` for random seeds.
        max_logprobs: most ``logprobs`` and ``prompt_logprobs`` of a request; -1 for no limit.
        generation_config: ``"vllm"`` ignores the sampling parameters of generation_config.json.
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
        seed: int | None = None,
        max_logprobs: int = -1,
        generation_config: Literal["auto", "vllm"] = "auto",
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
        check_type("generation_config", generation_config, "'auto' or 'vllm'", str)
        if generation_config not in ("auto", "vllm"):
            raise ValueError(
                "generation_config should be 'auto', for the model's own file, or 'vllm', for "
                f"none, and is {shorten(generation_config)}"
            )
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
        self._defaults = SamplingParams()
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
            self._read_tokenizer(text_folder or self.source.folder)
            if self.no_tokenizer and text_folder is not None and not skip_tokenizer_init:
                raise CheckpointFormatError(self.no_tokenizer)
            if generation_config == "auto":
                self._defaults = default_sampling_params(self.source.folder)
            self._prepare(config)
        except BaseException:
            self.close()
            raise
        _log.info("%s in %.1f s", self._describe(config), time.monotonic() - begin)

    def _read_tokenizer(self, folder: Path) -> None:
        """Read the tokenizer and the chat template, or the reasons why there are none."""
        try:
            if not self.no_tokenizer:
                self.tokenizer = read_tokenizer(folder, self._trusts_code)
        except CheckpointFormatError as error:
            self.no_tokenizer = str(error)
        try:
            self._template = ChatTemplate(folder, None, self._templates)
        except CheckpointFormatError as error:
            self.no_chat_template = str(error)

    def _prepare(self, config: EngineConfig) -> None:
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
            stop_tokens(self.source.folder) | ({eos} if eos is not None else set()),
            eos,
            repeatable=self.executor.size == 1,
            wait=self.executor.wait,
            async_scheduling=on_gpu if config.async_scheduling is None else config.async_scheduling,
            stream=torch.cuda.current_stream(worker.device) if on_gpu else None,
        )
        self._ids = itertools.count()
        self._embedder: Embedder | None = None
        if worker.is_encoder:
            self.no_text = (
                f"{hf_config.architectures[0]} is an encoder and generates no text: "
                "LLM.embed returns embeddings of prompts"
            )
            self._embedder = Embedder(
                self.executor.embed,
                self.source.folder,
                hf_config.vocab_size,
                length,
                config,
                self.get_tokenizer,
            )
            if on_gpu:
                tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
                for inputs in warm_up_batches(tokens, sequences, length):
                    self.executor.embed(inputs)

    def _describe(self, config: EngineConfig) -> str:
        """Return what was loaded, and the memory that it takes, as one line."""
        worker, pool = self.executor.worker, self.engine.scheduler.pool
        tensors = (*worker.model.parameters(), *worker.model.buffers())
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        ranks = "1 rank" if self.executor.size == 1 else f"{self.executor.size} ranks, each with"
        cache = (
            f"{pool.num_pages} KV pages of {config.block_size} tokens ({self.engine.cache_tokens} "
            f"tokens, {pool.num_pages * worker.page_bytes / 2**20:.1f} MiB)"
        )
        if worker.state_bytes:
            states = worker.num_states * worker.state_bytes
            cache += f" and {worker.describe_states()} ({states / 2**20:.1f} MiB)"
        return (
            f"loaded {self.source.name} ({self.source.config.architectures[0]}, "
            f"{str(self.source.dtype).removeprefix('torch.')}) on {worker.device}: {ranks}"
            f"{' with' if self.executor.size == 1 else ''} {nbytes / 2**20:.1f} MiB of weights and "
            f"{cache if pool.num_pages else 'no KV cache'}"
        )

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
    ) -> list[RequestOutput]:
        """Continue prompts in one batch, and return an output for each, in their order.

        Args:
            prompts: text, ``{"prompt_token_ids": [...]}``, or a sequence of these.
            sampling_params: one for all prompts, or a sequence with one for each prompt; without,
                :meth:`get_default_sampling_params`.
            use_tqdm: draw a progress bar on standard error.

        A prompt that is refused has an ``error`` in its output; the others are not affected.

        Raises:
            ValueError: every prompt is refused, ``prompts`` is of another type, or the number of
                sampling parameters is not the number of prompts.
            ModelNotReadyError: the engine sleeps, or an update of the weights failed.
            RankError: a rank ended, hangs or failed, now or before; it is named.
            RuntimeError: a step failed, or the engine was closed. Requests of other threads in that
                step get the reason as their ``error``.

        """
        return self._generate(as_list(prompts, "prompts"), sampling_params, use_tqdm)

    def _generate(
        self, prompts: Sequence[Prompt | ValueError], sampling_params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Continue prompts; one that is an error is refused with it."""
        self._check("generate")
        params_list = self._params(sampling_params, len(prompts))
        requests: list[Request | RequestOutput] = []
        bar = None
        try:
            for prompt, params in zip(prompts, params_list, strict=True):
                requests.append(self._add(prompt, params))
            report_refused(requests)
            running = {each.request_id for each in requests if isinstance(each, Request)}
            if use_tqdm:
                from tqdm.auto import tqdm

                refused = len(requests) - len(running)
                bar = tqdm(total=len(requests), initial=refused, desc="prompts")
            while running:
                self.engine.step()
                for request_id in [each for each in running if each not in self.engine.requests]:
                    running.discard(request_id)
                    if bar is not None:
                        bar.update()
        finally:
            for each in requests:
                if isinstance(each, Request):
                    self.engine.abort(each.request_id)  # does nothing for a finished request
            if bar is not None:
                bar.close()
        return [self._output(each) if isinstance(each, Request) else each for each in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: ContentFormat = "auto",
    ) -> list[RequestOutput]:
        """Answer one or more conversations, formatted by the checkpoint's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a sequence of such lists.
            sampling_params, use_tqdm: as for :meth:`generate`.
            chat_template: a template to use instead of the checkpoint's.
            add_generation_prompt: end the prompt with the beginning of the assistant's message.
            tools: descriptions of tools, in the form that the template expects.
            chat_template_kwargs: other variables of the template, such as ``enable_thinking``.
            chat_template_content_format: what the template gets as content: ``"string"``,
                ``"openai"`` (a list of parts), or by default what it shows.

        Raises:
            CheckpointFormatError: the checkpoint has no chat template, or no tokenizer.
            ValueError: the template refuses all messages, or does not read a variable.

        Otherwise as :meth:`generate`: a conversation that is refused has an ``error``.

        """
        self._check("generate")
        items = as_list(messages, "messages")
        is_one = not items or any(isinstance(each, Mapping) for each in items)
        conversations = [items] if is_one else items
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
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

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = True,
        pooling: Pooling | None = None,
        truncate: bool = False,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding for each prompt, in their order; the model has to be an encoder.

        Args:
            prompts: as for :meth:`generate`.
            normalize: divide each embedding by its Euclidean norm.
            pooling: ``"cls"`` for the first token's hidden state, ``"last"`` for the last one's,
                ``"mean"`` for the mean; without, what the files of sentence-transformers in the
                checkpoint say, and the mean if there are none.
            truncate: leave out the end of a prompt that is too long, and keep the special tokens of
                a text; else the prompt is refused.
            use_tqdm: draw a progress bar on standard error.

        A prompt that is refused, or whose embedding is not finite, has an ``error`` in its output;
        the others are not affected.

        Raises:
            UnsupportedModelError: the model generates text, or the checkpoint asks for a pooling
                that is not implemented.

        Otherwise as :meth:`generate`.

        """
        items = as_list(prompts, "prompts")
        for name, value in (("normalize", normalize), ("truncate", truncate)):
            check_type(name, value, "True or False", bool)
        with self.engine.alone():
            self._check("embed")
            assert self._embedder is not None
            return self._embedder.embed(items, pooling, normalize, truncate, use_tqdm)

    def update_weights(self, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]]) -> None:
        """Update weights of the running model in place, between two steps.

        Running requests keep the keys and values that are computed already. An update that is
        refused before anything was written changes nothing: requests go on. If it fails later,
        they end with the reason as their ``error``, and new requests are refused until an update
        brings a whole checkpoint, or :meth:`reload_weights` succeeds.

        An engine that sleeps at level 2 takes a whole checkpoint, and is awake then.

        Raises:
            WeightLoadError: the model refuses the weights.
            RuntimeError: the engine sleeps, and has its weights in host memory.

        """
        with self.engine.alone():
            self.executor.check()
            if self.executor.asleep == 1:
                raise RuntimeError("the engine sleeps: wake_up() first")
            self._change("an update of the weights", self.executor.update_weights, weights)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the weights and the KV cache, until :meth:`wake_up`.

        Args:
            level: 1 copies the weights to host memory, so that the engine wakes up with them; on a
                CPU they stay where they are. 2 drops them.

        Raises:
            RuntimeError: there are requests.
            MemoryError: host memory has no room for the weights.
            ModelNotReadyError: an update of the weights broke midway, and the level is 1.

        """
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(f"level should be 1 or 2, got {shorten(level)}")
        with self.engine.alone():
            self.executor.check()
            if self.engine.requests:
                raise RuntimeError(f"{len(self.engine.requests)} requests are going on")
            if self.executor.asleep:
                raise RuntimeError("the engine sleeps already: wake_up() first")
            self.executor.sleep(level)
            self.engine.fail("the engine sleeps: wake_up() first")

    def wake_up(self) -> None:
        """Give the engine the weights that it slept with, and accept requests.

        Those of level 2 are loaded from the model's folder again, if no update had changed them and
        the folder has not changed since. Does nothing if the engine is awake.

        Raises ``ModelNotReadyError`` if the weights that slept are nowhere any more, or if an
        update of the weights broke midway.
        """
        with self.engine.alone():
            self.executor.check()
            if self.executor.asleep:
                self._change("waking up", self.executor.wake_up)
            elif self.executor.refusal is not None:
                raise ModelNotReadyError(
                    "waking up repairs no update: update_weights with a whole checkpoint, or "
                    f"reload_weights(): {self.executor.refusal}"
                )

    def reload_weights(self) -> None:
        """Load the weights of the model's folder again, as they are there now.

        Updates since the first load are lost. A sleeping engine wakes up, and one whose update
        broke is repaired. Raises what loading raises.
        """
        with self.engine.alone():
            self.executor.check()
            self._change("reloading the weights", self.executor.reload_weights)

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

    def _check(self, method: Literal["generate", "embed"]) -> None:
        """Raise if no request is served, whatever it is, or if the model is for another method."""
        self.executor.check()
        if method == "generate" and self.no_text:
            raise UnsupportedModelError(self.no_text)
        if method == "embed" and self._embedder is None:
            raise UnsupportedModelError(
                f"{self.source.config.architectures[0]} generates text, and only an encoder such "
                "as BertModel embeds prompts: call generate, or load an encoder"
            )
        if self.engine.refusal is not None:
            raise ModelNotReadyError(f"the engine takes no more requests: {self.engine.refusal}")

    def _change(self, what: str, change: Callable[..., None], *arguments: Any) -> None:
        try:
            change(*arguments)
        except BaseException as error:
            if not self.executor.can_run:
                self.engine.fail(f"{what} failed: {describe_error(error)}")
            raise
        self.engine.resume()

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
        self, prompt: Prompt | ValueError, params: SamplingParams, *, streamed: bool = False
    ) -> Request | RequestOutput:
        """Add a prompt to the engine; return its request, or an output with its ``error``."""
        request_id = str(next(self._ids))
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        text = text if isinstance(text, str) else None
        ids: list[int] = []
        try:
            if isinstance(prompt, ValueError):
                raise prompt
            ids = token_ids(prompt, lambda text: self.get_tokenizer().encode(text))
            most = max(params.logprobs or 0, params.prompt_logprobs or 0)
            if 0 <= self._max_logprobs < most:
                raise ValueError(f"{most} logprobs are more than max_logprobs={self._max_logprobs}")
            if self._seeds is not None and params.seed is None:
                params = params.model_copy(update={"seed": self._seeds.getrandbits(63)})
            return self.engine.add(request_id, ids, params, text, streamed=streamed)
        except ValueError as error:
            return refused(request_id, text, ids, error)

    def _output(self, request: Request) -> RequestOutput:
        with self.engine.reading():
            output = request_output(request)
        if self.tokenizer is not None:
            decode_logprobs(output, self.tokenizer)
        return output

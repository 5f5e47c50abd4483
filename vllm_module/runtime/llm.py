from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_module.config import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import describe_error, shorten
from vllm_module.runtime.chat import ChatTemplate, Messages
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.executor import Executor
from vllm_module.runtime.outputs import CompletionOutput, RequestOutput, request_output
from vllm_module.runtime.page_pool import PagePool
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.tokenizer import Tokenizer, stop_tokens
from vllm_module.weights import Weight

Prompt = str | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

_LENGTH = 8192  # of a sequence, where neither the model nor the caller has a limit


_HANGS = 30.0  # seconds of a step after which it is closed in the middle of it
_PROMPT = {"prompt", "prompt_token_ids"}


class LLM:
    """A loaded model that turns prompts into text.

    ``LLM("folder").generate("Once upon a time")[0].outputs[0].text``

    Args:
        model: a local folder in Hugging Face layout, or a hub id.
        revision, dtype, quantization, max_model_len, hf_overrides: as in
            :class:`~vllm_module.config.ModelConfig`.
        device: a device string of torch, or ``"auto"`` for CUDA if there is one.
        load_config: how weights are loaded.
        engine: entries of :class:`~vllm_module.config.EngineConfig`, such as
            ``tensor_parallel_size``, ``kv_cache_dtype`` and ``gpu_memory_utilization``.

    With ``tensor_parallel_size`` of more than one, other processes of this host are started, and
    end with :meth:`close`, with this process or with the ``with`` block. Under torchrun its
    processes are the ranks: those that are not the first serve it in here, and exit when it closes.
    Threads may share it: their requests are computed together.

    Raises:
        WeightLoadError: the checkpoint is refused.
        ValueError: settings that do not fit, or fewer devices than ranks.

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
        device: str = "auto",
        load_config: LoadConfig | None = None,
        **engine: Any,
    ) -> None:
        entries: dict[str, Any] = {
            "model": str(model),
            "revision": revision,
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": max_model_len,
            "hf_overrides": dict(hf_overrides or {}),
        }
        model_config = ModelConfig(**entries)
        config = EngineConfig(**engine)
        self.executor = Executor(
            model_config,
            LoadConfig.model_validate(load_config or {}),
            DeviceConfig(device=device),
            config,
        )
        if self.executor.rank > 0:
            self.executor.follow()
            raise SystemExit(0)
        try:
            self._prepare(model_config, config)
        except BaseException:
            self.close()
            raise

    def _prepare(self, model_config: ModelConfig, config: EngineConfig) -> None:
        self.source = self.executor.worker.source
        folder = self.source.folder
        self.tokenizer: Tokenizer | None = None
        self.no_tokenizer = ""
        try:
            self.tokenizer = Tokenizer(folder)
        except CheckpointFormatError as error:
            self.no_tokenizer = str(error)
        self._template: ChatTemplate | None = None
        hf_config = self.source.config
        length = model_config.max_model_len or hf_config.context_length or _LENGTH
        pages, host_pages = self.executor.start(length)
        size = config.block_size
        scheduler = Scheduler(
            PagePool(pages, size),
            PagePool(host_pages, size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.enable_prefix_caching,
            self.executor.worker.window,
        )
        self.engine = Engine(
            self.executor.run,
            scheduler,
            hf_config.vocab_size,
            length,
            self.tokenizer,
            stop_tokens(folder),
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Go on from prompts, all of them together, and return their outputs in their order.

        Args:
            prompts: text, ``{"prompt_token_ids": [...]}``, or a sequence of these.
            sampling_params: for all prompts, or one for each.
            use_tqdm: draw a progress bar on standard error.

        A prompt that cannot be served has an ``error`` in its output, and the others go on.

        Raises:
            ValueError: prompts that are none, or parameters that are none or as many as there are
                no prompts.
            RuntimeError: a step failed, or a rank ended. (Other threads' requests, if it was in
                theirs, have that as their error.)

        """
        several = _listed(prompts, "prompts")
        params = self._params(sampling_params, len(several))
        taken: list[Request | RequestOutput] = []
        bar = None
        try:
            for prompt, its in zip(several, params, strict=True):
                taken.append(self._add(prompt, its))
            ids = {each.request_id for each in taken if isinstance(each, Request)}
            if use_tqdm:
                from tqdm.auto import tqdm

                bar = tqdm(total=len(taken), initial=len(taken) - len(ids), desc="prompts")
            while ids:
                self.engine.step()
                for request_id in [each for each in ids if each not in self.engine.requests]:
                    ids.discard(request_id)
                    if bar is not None:
                        bar.update()
        finally:
            for each in taken:
                if isinstance(each, Request):
                    self.engine.abort(each.request_id)  # if it has not ended
            if bar is not None:
                bar.close()
        return [self._output(each) if isinstance(each, Request) else each for each in taken]

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
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, laid out by the checkpoint's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a sequence of such lists.
            sampling_params, use_tqdm: as for :meth:`generate`.
            chat_template: in place of the checkpoint's own.
            add_generation_prompt: end the prompt with the beginning of the answer.
            tools: what the template tells the model of, as it wants them.
            chat_template_kwargs: other variables of the template, such as ``enable_thinking``.

        Raises:
            CheckpointFormatError: the checkpoint has no chat template, or no tokenizer.
            ValueError: messages that the template refuses, or variables that it does not read.

        """
        several = _listed(messages, "messages")
        one = not several or any(isinstance(each, Mapping) for each in several)
        conversations = [several] if one else several
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tools is not None:
            variables["tools"] = tools
        variables |= chat_template_kwargs or {}
        prompts = [
            self.chat_prompt(conversation, chat_template, **variables)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: Messages, chat_template: str | None = None, /, **variables: Any
    ) -> dict[str, Any]:
        """Return a conversation as a prompt for :meth:`generate` or :meth:`stream`."""
        template = self._template
        if chat_template is not None:
            template = ChatTemplate(self.source.folder, chat_template)
        elif template is None:
            self._template = template = ChatTemplate(self.source.folder)
        text = template.render(messages, **variables)
        if self.tokenizer is None:
            raise CheckpointFormatError(self.no_tokenizer)
        # The template wrote the special tokens already.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, False)}

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Go on from a prompt and yield what there is of it, more with each token.

        Other requests go on meanwhile: streams may be taken in turns. One that is closed, or let
        go, is aborted.

        Raises ``ValueError``, with the first item, for a prompt that cannot be served.
        """
        taken = self._add(prompt, sampling_params or SamplingParams(), streamed=True)
        if isinstance(taken, RequestOutput):
            raise ValueError(taken.error)
        shown = len(taken.prompt_token_ids)
        try:
            while True:
                # Another stream's step may have gone on with this one, or ended it, meanwhile.
                finished, count = taken.finished, sum(len(s.tokens) for s in taken.sequences)
                if finished or count > shown:
                    shown = count
                    yield self._output(taken)
                else:
                    self.engine.step()
                if finished:
                    return
        finally:
            self.engine.abort(taken.request_id)

    def update_weights(self, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]]) -> None:
        """Put new weights into the running model, in place, between two steps.

        Requests that are going on keep the keys and values that they have. If it fails, they end
        with the reason, and no request is taken before an update or :meth:`wake_up` succeeds.

        Raises what the model refuses the weights for, and ``RuntimeError`` while it sleeps.
        """
        with self.engine.alone():
            if self.executor.asleep:
                raise RuntimeError("the engine sleeps: wake_up() first")
            self._change("an update of the weights", self.executor.update_weights, weights)

    def sleep(self) -> None:
        """Release the memory of weights and cache. Raises ``RuntimeError`` while requests go on."""
        with self.engine.alone():
            if self.engine.requests:
                raise RuntimeError(f"{len(self.engine.requests)} requests are going on")
            self.engine.fail("the engine sleeps: wake_up() first")
            self.executor.sleep()

    def wake_up(self) -> None:
        """Load the checkpoint again, as it is on disk, and take requests."""
        with self.engine.alone():
            self._change("waking up", self.executor.wake_up)

    def close(self) -> None:
        """End the other ranks and release the cache; safe to call more than once."""
        engine: Engine | None = getattr(self, "engine", None)  # which could not be made
        stepped = engine is not None and engine.lock.acquire(timeout=_HANGS)
        try:
            self.executor.close()
        finally:
            if engine is not None and stepped:
                engine.lock.release()

    def _change(self, what: str, change: Callable[..., None], *arguments: Any) -> None:
        try:
            change(*arguments)
        except BaseException as error:
            self.engine.fail(f"{what} failed: {describe_error(error)}")
            raise
        self.engine.resume()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params(self, given: Params, count: int) -> list[SamplingParams]:
        one = given is None or isinstance(given, SamplingParams)
        several: list[Any] = [given] * count if one else _listed(given, "sampling_params")
        if len(several) != count:
            raise ValueError(f"there are {len(several)} sampling_params for {count} prompts")
        for each in several:
            if each is not None and not isinstance(each, SamplingParams):
                raise ValueError(f"sampling_params should be SamplingParams, got {shorten(each)}")
        return [each or SamplingParams() for each in several]

    def _add(
        self, prompt: Prompt, params: SamplingParams, *, streamed: bool = False
    ) -> Request | RequestOutput:
        """Take a prompt in, or return an output that says why not."""
        request_id = str(next(self._ids))
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        text = text if isinstance(text, str) else None
        ids: list[int] = []
        try:
            ids = self._token_ids(prompt)
            return self.engine.add(request_id, ids, params, text, streamed=streamed)
        except ValueError as error:
            none = CompletionOutput(0, "", [], None, None, "error")
            return RequestOutput(request_id, text, ids, [none], True, error=str(error))

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(self.no_tokenizer)
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping) and prompt and prompt.keys() <= _PROMPT:
            ids = prompt.get("prompt_token_ids")
            if ids is None and isinstance(prompt.get("prompt"), str):
                return self._token_ids(prompt["prompt"])
            if isinstance(ids, (list, tuple)) and all(type(token) is int for token in ids):
                return list(ids)
        raise ValueError(
            "a prompt should be text or {'prompt_token_ids': [...]}, a list of integers, got "
            f"{shorten(prompt)}"
        )

    def _output(self, request: Request) -> RequestOutput:
        with self.engine.lock:
            output = request_output(request)
        if self.tokenizer is not None:
            entries = list(output.prompt_logprobs or [])
            for completion in output.outputs:
                entries += completion.logprobs or []
            for entry in entries:
                for token, logprob in (entry or {}).items():
                    if logprob.decoded_token is None:
                        logprob.decoded_token = self.tokenizer.decode([token], False)
        return output


def _listed(given: Any, name: str) -> list[Any]:
    if isinstance(given, (str, Mapping)):
        return [given]
    if given is None or isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable):
        raise ValueError(f"{name} should be one or a sequence of them, got {shorten(given)}")
    return list(given)

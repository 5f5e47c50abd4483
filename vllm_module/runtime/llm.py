from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_module.config import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.chat import ChatTemplate, Messages
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.executor import Executor
from vllm_module.runtime.outputs import CompletionOutput, RequestOutput, request_output
from vllm_module.runtime.page_pool import PagePool
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.tokenizer import Tokenizer, stop_tokens
from vllm_module.weights import Weight, resolve

Prompt = str | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

_LENGTH = 8192  # of a sequence, where neither the model nor the caller has a limit


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

    Raises:
        WeightLoadError: the checkpoint is refused.
        ValueError: settings that do not fit, or fewer devices than ranks.

    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
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
            model_config, load_config or LoadConfig(), DeviceConfig(device=device), config
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
        folder = resolve(model_config.model, model_config.revision)
        self.tokenizer: Tokenizer | None = None
        self._no_tokenizer = ""
        try:
            self.tokenizer = Tokenizer(folder)
        except CheckpointFormatError as error:
            self._no_tokenizer = str(error)
        self._folder = folder
        self._template: ChatTemplate | None = None
        hf_config: Any = self.executor.worker.model.config
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
        self._requests = 0

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
            ValueError: prompts that are none, or as many parameters as there are no prompts.
            RuntimeError: a step failed, or a rank ended; nothing more can be served then.

        """
        several = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = self._params(sampling_params, len(several))
        taken = [self._add(*each) for each in zip(several, params, strict=True)]
        ids = {each.request_id for each in taken if isinstance(each, Request)}
        bar = None
        if use_tqdm:
            from tqdm.auto import tqdm

            bar = tqdm(total=len(taken), initial=len(taken) - len(ids), desc="prompts")
        try:
            while ids:
                for request in self.engine.step():
                    if request.finished and request.request_id in ids:
                        ids.discard(request.request_id)
                        if bar is not None:
                            bar.update()
                ids &= self.engine.requests.keys()
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
            if bar is not None:
                bar.close()
        return [self._output(each) if isinstance(each, Request) else each for each in taken]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, laid out by the checkpoint's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a sequence of such lists.
            sampling_params, use_tqdm: as for :meth:`generate`.
            template: other variables of the template, such as ``enable_thinking``.

        Raises:
            CheckpointFormatError: the checkpoint has no chat template, or no tokenizer.
            ValueError: messages that the template refuses.

        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [self.chat_prompt(conversation, **template) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Messages, **template: Any) -> dict[str, Any]:
        """Return a conversation as a prompt for :meth:`generate` or :meth:`stream`."""
        if self._template is None:
            self._template = ChatTemplate(self._folder)
        text = self._template.render(messages, **template)
        if self.tokenizer is None:
            raise CheckpointFormatError(self._no_tokenizer)
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
        """
        try:
            self.executor.update_weights(weights)
        except BaseException as error:
            self.engine.fail(f"an update of the weights failed: {error}")
            raise
        self.engine.resume()

    def sleep(self) -> None:
        """Release the memory of weights and cache. Raises ``RuntimeError`` while requests go on."""
        if self.engine.requests:
            raise RuntimeError(f"{len(self.engine.requests)} requests are going on")
        self.executor.sleep()
        self.engine.fail("the engine sleeps: wake_up() first")

    def wake_up(self) -> None:
        """Load the checkpoint again, as it is on disk."""
        self.executor.wake_up()
        self.engine.resume()

    def close(self) -> None:
        """End the other ranks and release the cache; safe to call more than once."""
        self.executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params(self, given: Params, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * count
        if len(given) != count:
            raise ValueError(f"there are {len(given)} sampling_params for {count} prompts")
        return list(given)

    def _add(
        self, prompt: Prompt, params: SamplingParams, *, streamed: bool = False
    ) -> Request | RequestOutput:
        """Take a prompt in, or return an output that says why not."""
        request_id = str(self._requests)
        self._requests += 1
        text = prompt if isinstance(prompt, str) else prompt.get("prompt")
        ids: list[int] = []
        try:
            ids = self._token_ids(prompt)
            return self.engine.add(request_id, ids, params, text, streamed=streamed)
        except ValueError as error:
            none = CompletionOutput(0, "", [], None, None, "error")
            return RequestOutput(request_id, text, ids, [none], True, error=str(error))

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(self._no_tokenizer)
            return self.tokenizer.encode(prompt)
        ids = prompt.get("prompt_token_ids")
        if ids is None and isinstance(prompt.get("prompt"), str):
            return self._token_ids(prompt["prompt"])
        if not isinstance(ids, (list, tuple)) or not all(type(token) is int for token in ids):
            raise ValueError(
                "a prompt should be text or {'prompt_token_ids': [...]}, a list of integers"
            )
        return list(ids)

    def _output(self, request: Request) -> RequestOutput:
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

"""``LLM``: a loaded model with its engine, as scripts use it."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from vllm_module.base.summary import Summarized, mebibytes
from vllm_module.config import (
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    LoadFormat,
    ModelConfig,
    ModelImpl,
)
from vllm_module.distributed import surrounding_stage
from vllm_module.errors import CheckpointFormatError, ModelNotReadyError, UnsupportedModelError
from vllm_module.runtime.adapter_methods import AdapterMethods
from vllm_module.runtime.arguments import LLM_ARGUMENTS, check_type, known_arguments
from vllm_module.runtime.chat_methods import ChatMethods
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.expert_methods import ExpertMethods
from vllm_module.runtime.generation_config import (
    default_sampling_params,
    own_folder,
    stop_tokens,
)
from vllm_module.runtime.metrics import Metric, engine_metrics
from vllm_module.runtime.outputs import ServedModelConfig
from vllm_module.runtime.pooling.encoder_methods import EncoderMethods
from vllm_module.runtime.rank_methods import RankMethods
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.resharding import Resharding
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.started import adapter_memory, length_of, start, take_part
from vllm_module.runtime.text.chat import ChatTemplate, template_of
from vllm_module.runtime.text.code_tokenizer import read_tokenizer
from vllm_module.runtime.text.template_process import TemplateProcess
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.runtime.weight_methods import WeightMethods
from vllm_module.weights import resolve

_log = logging.getLogger(__name__)

_DTYPES: dict[Any, str] = {"half": "float16", "float": "float32"}  # vLLM's other names
_CLOSE_TIMEOUT = 30.0  # seconds that close() waits for a step to end


class LLM(
    AdapterMethods,
    ChatMethods,
    EncoderMethods,
    ExpertMethods,
    RankMethods,
    Resharding,
    WeightMethods,
    Summarized,
):
    """A loaded model that turns prompts into text, or an encoder that turns them into vectors.

    ``LLM("folder").generate("Once upon a time")[0].outputs[0].text``

    Args:
        model: a folder, a GGUF file, a hub id or a URL, as in
            :class:`~vllm_module.config.ModelConfig`.
        revision, dtype, quantization, max_model_len, hf_overrides: as in
            :class:`~vllm_module.config.ModelConfig`.
        model_code, download_dir, hf_token, model_impl, trust_remote_code: the same.
        enable_expert_parallel, num_redundant_experts: the same.
        tokenizer, tokenizer_revision: a folder or hub id with the tokenizer and the chat template,
            instead of the model's.
        skip_tokenizer_init: read no tokenizer; prompts are token ids.
        chat_template: a template, the path of one, or the name of another one of the
            checkpoint's, instead of its default.
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
            arguments of vLLM are accepted with the values that change nothing, and
            ``model_impl="vllm"`` is ``"native"``.
            ``enable_prefix_caching`` is automatic: on, unless layers keep a state of each sequence
            (Mamba-2, Qwen3-Next, hybrids). There, ``True`` takes twice the memory for states.

    A ``tensor_parallel_size`` or ``pipeline_parallel_size`` above 1 starts more processes on this
    host, one for each rank of each stage. They end with
    :meth:`close`, with the ``with`` block, or with this process. Under torchrun, its processes are
    the ranks: rank 0 returns from the constructor, and the others run the model inside it until
    rank 0 closes the engine, then exit, or go on if the program has initialized a process group.
    It has to do so before: an ``init_process_group`` of rank 0 that waits for ranks in the
    constructor ends them with a ``RankError``. A ``tensor_parallel_size`` of 1, or a
    ``distributed_executor_backend``, asks for something else.
    Threads may share an ``LLM``; their requests are batched.

    Attributes:
        source: the :class:`~vllm_module.build.model_source.ModelSource`: folder, configuration,
            dtype.
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
        num_redundant_experts: int = 0,
        model_impl: ModelImpl | Literal["vllm"] = "auto",
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
        own = EngineConfig.model_fields.keys() | LLM.__init__.__annotations__
        own -= {"engine", "return"}
        engine = known_arguments("LLM", engine, own, LLM_ARGUMENTS)
        engine = {name: value for name, value in engine.items() if value is not None}
        generation_folder = own_folder(generation_config)
        expected = "a folder, a hub id or None"
        check_type("model", model, "a folder, a file, a hub id or a URL", str, Path)
        check_type("tokenizer", tokenizer, expected, str, Path, type(None))
        check_type("tokenizer_revision", tokenizer_revision, "text or None", str, type(None))
        check_type("download_dir", download_dir, "a folder or None", str, Path, type(None))
        check_type("chat_template", chat_template, "text, a path or None", str, Path, type(None))
        override = override_generation_config
        check_type("override_generation_config", override, "a mapping or None", Mapping, type(None))
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
            "num_redundant_experts": num_redundant_experts,
            "model_impl": "native" if model_impl == "vllm" else model_impl,
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
        self._seeds = random.Random(seed)
        if surrounding_stage.get() is not None:
            raise UnsupportedModelError(
                "an engine makes its pipeline stages itself: make it outside of pipeline_parallel, "
                "and give pipeline_parallel_size"
            )
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
        self.executor = Executor(model_config, loading, DeviceConfig(device=device), config)
        if not self.executor.leads:
            self.executor.follow()
            if not dist.is_initialized():  # what comes next in the script is rank 0's
                _log.warning(
                    "rank %d: rank 0 has closed the engine, and this process exits. In a program "
                    "that has more to do, call torch.distributed.init_process_group before LLM, or "
                    "give tensor_parallel_size=1 or distributed_executor_backend",
                    self.executor.rank,
                )
                raise SystemExit(0)
        if seed is None:
            self._seeds = random.Random(self.executor.of_first(random.getrandbits(64)))
        try:
            self.source = self.executor.worker.source
            self._read_tokenizer(text_folder or self.source.folder, chat_template)
            if self.no_tokenizer and text_folder is not None and not skip_tokenizer_init:
                raise CheckpointFormatError(self.no_tokenizer)
            folder = generation_folder or self.source.folder
            read = None if generation_config == "vllm" else folder
            self._defaults = default_sampling_params(read, override or {})
            self._ids, self._adapter_numbers = itertools.count(), itertools.count()
            end_tokens = stop_tokens(self.source.folder, folder, override, self.source.overrides)
            self.engine = self._make_engine(config, end_tokens)
            take_part(self.executor, self.engine)
            length = length_of(self.source)
            is_encoder = self.executor.worker.is_encoder
            self._pooler = self._make_pooler(config, length) if is_encoder else None
            self.model_config = ServedModelConfig(
                model_config.model,
                str(tokenizer or model_config.model),
                self.source.dtype,
                self.engine.max_model_len if self._pooler is None else self._pooler.max_length,
                self.source.config,
                model_config.revision,
                model_config.trust_remote_code,
                seed,
                next(self.executor.worker.model.parameters()).device,
                self.executor.size // self.executor.stages,
                self.engine.scheduler.pool.num_pages,
                config.block_size,
            )
        except BaseException:
            self.close()
            raise
        facts = "; ".join(f"{name}: {value}" for name, value in self.facts()[:-1])
        _log.info("loaded in %.1f s: %s", time.monotonic() - begin, facts)

    def _read_tokenizer(self, folder: Path, template: str | Path | None) -> None:
        """Read the tokenizer and the chat template, or the reasons why there are none."""
        try:
            if not self.no_tokenizer:
                self.tokenizer = read_tokenizer(folder, self._trusts_code)
        except CheckpointFormatError as error:
            self.no_tokenizer = str(error)
        try:
            given = None if template is None else template_of(folder, str(template))
            self._template = ChatTemplate(folder, given, self._templates)
        except CheckpointFormatError as error:
            self.no_chat_template = str(error)

    def _make_engine(self, config: EngineConfig, end_tokens: set[int]) -> Engine:
        """Start the cache, and return the engine.

        An encoder has no cache. Its engine takes no requests; embeddings use the engine's lock.
        """
        hf_config, worker = self.source.config, self.executor.worker
        on_gpu = worker.device.type == "cuda"
        stages = self.executor.stages
        # A pipeline overlaps steps of different requests.
        overlaps = on_gpu and stages == 1
        if config.async_scheduling is not None:
            overlaps = config.async_scheduling
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return Engine(
            self.executor.run if stages == 1 else self.executor.launch,
            start(self.executor),
            hf_config.vocab_size,
            length_of(worker.source),
            self.tokenizer,
            end_tokens | ({eos} if eos is not None else set()),
            eos,
            repeatable=self.executor.size == 1 and self.executor.rounds is None,
            first_tokens=worker.first_tokens,
            wait=self.executor.wait,
            async_scheduling=overlaps,
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
            stream=torch.cuda.current_stream(worker.device) if on_gpu else None,
            adapter_memory=adapter_memory(self.executor),
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return what was loaded and what memory it takes, as pairs of a name and a text."""
        if not hasattr(self, "model_config"):
            return [("state", "not loaded")]
        executor, scheduler = self.executor, self.engine.scheduler
        pool, longest = scheduler.pool, self.model_config.max_model_len
        worker, stages = executor.worker, executor.stages
        weights = sum(each.nbytes for each in (*worker.model.parameters(), *worker.model.buffers()))
        dtype = str(self.source.dtype).removeprefix("torch.")
        cache, held = "none", weights + pool.num_pages * worker.page_bytes
        if pool.num_pages:
            cache = (
                f"{pool.num_pages} pages of {pool.page_size} tokens, {self.engine.cache_tokens} in "
                f"all, {mebibytes(pool.num_pages * worker.page_bytes)}"
            )
        if worker.state_bytes:
            states = worker.num_states * worker.state_bytes
            cache += f"; {worker.describe_states()}, {mebibytes(states)}"
            held += states
        plan = f"tensor parallel {executor.size // stages}, pipeline parallel {stages}"
        return [
            ("model", self.source.name),
            ("architecture", f"{self.source.config.architectures[0]}, {dtype}"),
            ("layers", str(self.source.config.num_hidden_layers)),
            ("device", f"{worker.device}, ranks: {executor.size}"),
            ("plan", f"{plan}: {mebibytes(held)} on rank {executor.rank}"),
            ("weights of a rank", mebibytes(weights)),
            ("cache of a rank", cache),
            ("sequences", f"at most {longest} tokens, {scheduler.max_num_seqs} in a step"),
            ("state", executor.end or self.engine.refusal or "ready"),
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

    def get_metrics(self) -> list[Metric]:
        """Return what the engine has done so far and does now, by vLLM's names."""
        with self.engine.reading():
            scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
            totals = replace(self.engine.totals, preemptions=scheduler.preemptions)
            used = 1 - pool.free_pages / pool.num_pages if pool.num_pages else 0.0
            return engine_metrics(
                totals,
                {"model_name": self.source.name},
                {"num_gpu_blocks": pool.num_pages, "block_size": pool.page_size},
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
            if engine is not None and not engine.is_interrupted:
                self.executor.leave()
            locked = engine is not None and engine.lock.acquire(timeout=_CLOSE_TIMEOUT)
        finally:  # an interrupt ends only the waits for other engines and for a step
            try:
                self._templates.close()
                if engine is not None:
                    engine.grammars.close()
                if locked:
                    self.executor.settle()
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

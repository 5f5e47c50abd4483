"""The settings of a user: frozen, and with known names only."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vllm_module.base.load_formats import LoadFormat as LoadFormat
from vllm_module.base.messages import shorten, unknown_name

if TYPE_CHECKING:
    import torch


_MOST_PROBLEMS = 64  # that an error tells; a list from a stranger may have one in each item


class Settings(BaseModel):
    """A model of pydantic whose errors are one ``ValueError``, with a line for each problem.

    A line begins with the name of the setting: "max_model_len should be greater than 0, got -1".
    """

    if not TYPE_CHECKING:  # type checkers know the arguments from the fields

        def __init__(self, /, *positional: Any, **given: Any) -> None:
            if positional:
                kind, first = type(self).__name__, next(iter(type(self).model_fields))
                raise TypeError(f"{kind} takes its settings by name: {kind}({first}=...)")
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise _refusal(type(self), error) from None

        # What help() shows, and pydantic puts the settings into: none is taken by position.
        __init__.__signature__ = signature(lambda self, /, **given: None)

        @classmethod
        def model_validate(cls, given: Any, **options: Any) -> Any:
            """Do as pydantic does, with these errors."""
            try:
                return super().model_validate(given, **options)
            except ValidationError as error:
                raise _refusal(cls, error) from None


def _refusal(kind: type[BaseModel], error: ValidationError) -> ValueError:
    """Return an error with a line for each refused value and all that it should be instead."""
    wanted: dict[tuple[str, str], list[str]] = {}  # by name and value: types of a union differ
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_context=False)[:_MOST_PROBLEMS]:
        name, *inside = map(str, problem["loc"] or ("",))
        message, given = problem["msg"].removeprefix("Value error, "), problem["input"]
        field = kind.model_fields.get(name)
        if problem["type"] == "extra_forbidden":
            lines.append(f"{kind.__name__} {unknown_name(name, kind.model_fields)}")
        elif problem["type"] == "missing":
            lines.append(f"{name} is missing: {kind.__name__} needs it")
        elif problem["type"] == "value_error":
            lines.append(f"{name}: {message}" if name else message)
        elif not name:
            lines.append(f"{kind.__name__} should be a mapping of settings, got {shorten(given)}")
        else:
            name += "".join(f"[{each}]" for each in inside if each.lstrip("-").isdecimal())
            secret = field is not None and not field.repr
            got = "another type" if secret else shorten(given)
            expected = message.partition(" should ")[2] or message
            expected = re.sub(r", (unable|got) .*", "", expected)  # the value follows
            wanted.setdefault((name, got), []).append(expected)
    lines += [
        f"{name} should {', or '.join(dict.fromkeys(each))}, got {got}"
        for (name, got), each in wanted.items()
        # If an item of a list is refused, another type of the union is not what is wrong.
        if not any(other.startswith(f"{name}[") for other, _ in wanted)
    ]
    return ValueError("\n".join(lines))


# Strict: True is no number of tokens, and "5" neither.
_Count = Annotated[int, Field(gt=0, strict=True)]
_Flag = Annotated[bool, Field(strict=True)]


class _Closed(Settings):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


OnlineScheme = Literal[
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
    "int8_per_channel_weight_only",
    "int4_per_group",
    "bitsandbytes",
]


ModelImpl = Literal["auto", "native", "transformers"]


class QuantizationConfig(_Closed):
    """How a full-precision checkpoint is quantized while it is loaded.

    Layers are named as in the checkpoint. A name, or consecutive components of one (``"mlp"``,
    ``"layers.0"``), selects that module and everything below it. ``re:`` begins a regular
    expression, which is matched against whole names from their beginning. An entry that selects
    nothing is refused. An embedding, and a head that is tied to it, is quantized only by a name of
    its own in ``overrides``: ``"lm_head"`` or ``"embed_tokens"``.

    Attributes:
        scheme: for every linear layer that is in neither ``ignore`` nor ``overrides``.
        ignore: layers that are not quantized.
        overrides: layers with another scheme, or ``"none"``. The first match counts. ``overrides``
            go before ``ignore``.
        weight_block_size: rows and columns of a block, for ``fp8_per_block``.
        group_size: inputs that share a scale, for ``int4_per_group``; a multiple of 8.

    """

    scheme: OnlineScheme
    ignore: tuple[str, ...] = ("lm_head",)
    overrides: dict[str, OnlineScheme | Literal["none"]] = Field(default_factory=dict)
    weight_block_size: tuple[_Count, _Count] = (128, 128)
    group_size: Annotated[int, Field(gt=0, multiple_of=8, strict=True)] = 128


class ModelConfig(_Closed):
    """Which model to build, and how.

    Attributes:
        model: a local folder in Hugging Face layout, a GGUF file, a hub id, or a URL: of an object
            store or web server (``s3://``, ``gs://``, ``az://``, ``https://``,
            ``hf://owner/name``), or of a registered source.
        revision: branch, tag or commit of the hub repository.
        dtype: of the parameters, as a name or a ``torch.dtype``. ``"auto"`` is the checkpoint's.
        quantization: how to quantize while loading: the name of a scheme (``"fp8"`` is per tensor)
            or a ``QuantizationConfig``; ``"bitsandbytes"`` is NF4 in blocks of 64. A quantized
            checkpoint needs none; for it, ``"fp8"``, ``"compressed-tensors"``, ``"gptq"``,
            ``"awq"`` or ``"bitsandbytes"`` only checks that it has this format.
        max_model_len: most tokens of a sequence; the limit of ``config.json`` unless given.
        hf_overrides: entries that replace those of ``config.json``, and of its ``text_config``.
        download_dir: where a model of the hub is kept, instead of the hub's own cache, and where
            fetched ranges of the weights of a URL are kept for later loads and other processes.
            Without it, these are not kept.
        hf_token: of the hub, instead of the one that ``hf auth login`` stored.
        model_code: a Python file whose models are used for the architectures of their names. It is
            run once in a process: after an edit, start the process again.
        enable_expert_parallel: each rank holds whole experts of mixture-of-experts layers, instead
            of its tensor-parallel part of every expert.
        num_redundant_experts: places of a layer for experts that are held a second time, or more
            often, each time on another rank. ``LLM.rearrange_experts`` gives them to those with
            most tokens.
        model_impl: ``"native"`` is a model of this package, or one that was registered;
            ``"transformers"`` is the class of the transformers library, with our layers in it.
            ``"auto"`` is native where there is one.
        trust_remote_code: run Python files of the checkpoint where no other code defines its model
            or its tokenizer. A native model needs none. Read the files first: they can do anything.

    """

    model: str
    revision: str | None = None
    download_dir: str | None = None
    hf_token: str | bool | None = Field(default=None, repr=False)
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        BeforeValidator(
            lambda dtype: (
                # torch need not be imported to recognize its dtypes.
                str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype
            )
        ),
    ] = "auto"
    quantization: (
        OnlineScheme
        | Literal["fp8", "compressed-tensors", "gptq", "awq"]
        | QuantizationConfig
        | None
    ) = None
    max_model_len: _Count | None = None
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    model_code: Path | None = None
    enable_expert_parallel: _Flag = False
    num_redundant_experts: Annotated[int, Field(ge=0, strict=True)] = 0
    model_impl: ModelImpl = "auto"
    trust_remote_code: _Flag = False


class LoadConfig(_Closed):
    """How weights are loaded.

    Attributes:
        load_format: the format of the weights. ``"auto"`` takes the first format of files that
            there is, in the order of the names, and the log says which. ``"npcache"`` reads the
            folder ``np`` that vLLM and SGLang make of ``.bin`` files, and makes it where it is not
            there. ``"layered"`` is ``"auto"``: every load quantizes one module after the other.
            ``"dummy"`` reads the configuration only, and computes each value from its tensor's name
            and its place.
        show_progress: draw a progress bar with bytes and rate on standard error.
        timeout: seconds that a rank which is ready waits for ranks in other processes: first
            until they have found (and downloaded) the checkpoint, then until they have loaded it.
        cooperative: whether ranks in several processes read together: each byte once, and what
            several ranks keep is passed between them, through 128 MiB of memory on each host. With
            ``"auto"``, they do so if the weights come from a registered source, or from a file
            system that several hosts share, unless their page caches have the files. On one host,
            the page cache shares local files already. Ranks of a sharded state never do, because
            each has files of its own.
        allow_nan: load weights that are NaN, and let updates bring them. By default they are
            refused by name, in tensors in memory and in what is read onto a GPU: a model that has
            one answers every request with an error.
        digests: keep the digests of what is read in the load's report (``load_report.digests``),
            compare copies of one part among ranks, and all with the ``digests.json`` of the folder
            or store, if there is one. It takes about as long as reading the weights from memory.

    """

    load_format: LoadFormat = "auto"
    show_progress: _Flag = False
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 1800.0
    cooperative: Literal["auto"] | _Flag = "auto"
    allow_nan: _Flag = False
    digests: _Flag = False


class EngineConfig(_Closed):
    """How a loaded model is served.

    Attributes:
        tensor_parallel_size: ranks, each a process with a device of its own.
        pipeline_parallel_size: stages of a pipeline, each with some of the layers on
            ``tensor_parallel_size`` ranks. Rank 0 is of the last stage, and samples.
        data_parallel_size: engines that share their experts (``enable_expert_parallel``): each has
            requests and a cache of its own, and some of the experts, on ``tensor_parallel_size``
            ranks. Each is made in a process of its own, and computes steps when any has requests.
        data_parallel_rank: this engine's number among them, from 0 on.
        data_parallel_address, data_parallel_rpc_port: where the engines meet; the first of them
            listens there.
        distributed_executor_backend: ``"mp"`` starts the other ranks, whatever world this process
            is in; ``"ray"`` lets Ray start them on the nodes of its cluster, where each finds the
            model itself; ``"uni"`` has one rank. With ``"external_launcher"`` each process that was
            launched is a rank of an engine of ``tensor_parallel_size`` of them, and all ranks of an
            engine make the same calls. By default it is torchrun's world, if torchrun has started
            several processes and ``tensor_parallel_size`` is not 1, else ``"mp"``.
        kv_cache_dtype: dtype of the KV cache; ``"auto"`` is the model's, ``"fp8"`` is fp8_e4m3.
        block_size: tokens in a page of the KV cache.
        gpu_memory_utilization: share of a GPU's memory for weights, one step and the KV cache.
        kv_cache_memory_bytes: size of the KV cache on each rank, instead of that share. On a CPU,
            1 GiB unless given.
        swap_space: GiB of host memory on each rank for the pages of preempted sequences, and at
            most half of it for their states. With 0, they are computed again, except for the pages
            that are still cached.
        enable_prefix_caching: reuse cached pages for prompts that begin with the same tokens. By
            default, if no layer keeps a state of each sequence; with ``True``, such models save
            states of prefixes, which takes as much memory as those of ``max_num_seqs`` sequences.
        max_num_seqs: most sequences in a step. Layers that keep a state of each sequence have
            memory for so many, beside the KV cache.
        max_num_batched_tokens: most tokens in a step; longer prompts are computed in chunks.
        step_timeout: seconds that a rank waits in a step for the others, which it then names.
        enforce_eager: run every step without CUDA graphs, and without recordings on a CPU.
        enable_torch_compile: let torch.compile fuse the operations between attention layers.
        enable_eplb: count the tokens of each expert, by which ``LLM.rearrange_experts`` moves them.
        enable_return_routed_experts: outputs have the experts that each token went to, as
            ``routed_experts``; of models with experts, in one pipeline stage.
        async_scheduling: launch the next step before the tokens of this one are read, if both only
            decode; tokens are the same. By default on a GPU, whose work the host's then overlaps.
        logprobs_mode: ``"raw_logprobs"`` of sampled tokens are the model's own; with
            ``"processed_logprobs"`` they are of the distribution that tokens are drawn from: after
            biases, penalties, bans, temperature, ``min_p``, ``top_k`` and ``top_p``. Those of
            prompts are always the model's own.
        max_loras: most LoRA adapters in one step; requests of others wait in turn.
        max_cpu_loras: most LoRA adapters in memory, ``max_loras`` or more, beside those that were
            updated. Those that were used longest ago are dropped, and read again from their folders
            when a request needs them; while one is read, there is one more. By default all stay.
        max_lora_rank: largest rank of a LoRA adapter; larger ones are refused. On a GPU, the cache
            leaves memory for ``max_loras`` adapters of all linear layers. By default any rank is
            taken, and memory beside the cache grows with the largest. The A and B of each loaded
            adapter are in host memory.
        worker_extension_cls: a class, or its qualified name, whose methods every rank's worker gets
            for :meth:`~vllm_module.LLM.collective_rpc`.

    """

    tensor_parallel_size: _Count = 1
    pipeline_parallel_size: _Count = 1
    data_parallel_size: _Count = 1
    data_parallel_rank: Annotated[int, Field(ge=0, strict=True)] | None = None
    data_parallel_address: str = "127.0.0.1"
    data_parallel_rpc_port: Annotated[int, Field(ge=1, le=65535, strict=True)] = 29550
    distributed_executor_backend: Literal["mp", "ray", "uni", "external_launcher"] | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    block_size: _Count = 16
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    kv_cache_memory_bytes: _Count | None = None
    swap_space: Annotated[float, Field(ge=0, le=2**20, strict=True)] = 0.0
    enable_prefix_caching: _Flag | None = None
    max_num_seqs: _Count = 256
    max_num_batched_tokens: _Count = 2048
    step_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 300.0
    enforce_eager: _Flag = False
    enable_torch_compile: _Flag = False
    enable_eplb: _Flag = False
    enable_return_routed_experts: _Flag = False
    async_scheduling: _Flag | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    max_loras: _Count = 8
    max_cpu_loras: _Count | None = None
    max_lora_rank: _Count | None = None
    worker_extension_cls: type | str | None = None

    @model_validator(mode="after")
    def _stages_overlap_by_themselves(self) -> EngineConfig:
        if self.pipeline_parallel_size > 1 and self.async_scheduling:
            raise ValueError(
                f"async_scheduling is for one stage, and pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}: leave it out, because stages compute batches of "
                "different requests at the same time"
            )
        return self

    @model_validator(mode="after")
    def _one_of_several_engines(self) -> EngineConfig:
        rank, size = self.data_parallel_rank, self.data_parallel_size
        if rank is None and size > 1:
            raise ValueError(
                f"data_parallel_size is {size}, and data_parallel_rank says which of them this "
                "engine is: make each in a process of its own, with its number from 0 on, or let "
                "vllm-module serve --data-parallel-size start them"
            )
        if rank is not None and rank >= size:
            raise ValueError(
                f"data_parallel_rank is {rank}: expected one below data_parallel_size, {size}"
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> EngineConfig:
        backend = f"distributed_executor_backend={self.distributed_executor_backend!r}"
        launched = self.distributed_executor_backend in ("ray", "external_launcher")
        stages = "pipeline_parallel_size" * (self.pipeline_parallel_size > 1)
        # What layers count, or agree upon in a step, is no part of compiled ones.
        compiled = "enable_torch_compile" * self.enable_torch_compile
        moved, others = "enable_eplb" * self.enable_eplb, backend * launched
        for name, used, given in (
            ("enable_eplb", self.enable_eplb, [compiled]),
            ("enable_return_routed_experts", self.enable_return_routed_experts, [stages, compiled]),
            ("data_parallel_size", self.data_parallel_size > 1, [stages, compiled, moved, others]),
        ):
            if used and any(given):
                raise ValueError(
                    f"{name} does not go with {' and '.join(filter(None, given))}: leave one of "
                    "them out"
                )
        return self

    @model_validator(mode="after")
    def _as_many_in_memory_as_in_a_step(self) -> EngineConfig:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras should be max_loras ({self.max_loras}) or more, got "
                f"{self.max_cpu_loras}"
            )
        return self


class DeviceConfig(_Closed):
    """Where the model lives: a device string of torch, or ``"auto"`` for CUDA if there is one."""

    device: str = "auto"

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises ``ValueError`` for an unknown one, or CUDA without a GPU."""
        if self.device != "auto" and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?|meta", self.device):
            raise ValueError(
                f"{self.device!r} is not a device: expected cpu, cuda, cuda:1 … or auto"
            )
        # Imported here because usage errors and help need no torch.
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device {self.device!r} was asked for, but torch finds no CUDA device"
            )
        return device

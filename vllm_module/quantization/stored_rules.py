"""The rules of a quantized checkpoint, from the ``quantization_config`` of its config.json.

Each format has a class with the entries that are read. compressed-tensors has a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from vllm_module.base.messages import shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.quantization.bitsandbytes import BitsAndBytes4BitMethod, BitsAndBytes8BitMethod
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.kv_cache import KV_SCALES
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.mxfp4 import MXFP4Method
from vllm_module.quantization.nvfp4 import BLOCK as BLOCK_OF_NVFP4
from vllm_module.quantization.nvfp4 import MODELOPT, NVFP4Method
from vllm_module.quantization.packed import (
    AWQ,
    GPTQ,
    GPTQ_OF_WORDS,
    GPTQ_V2,
    PackedFormat,
    PackedMethod,
)
from vllm_module.quantization.packed_gemv import AWQ_GEMV, GEMVMethod
from vllm_module.quantization.rules import Rule, Rules
from vllm_module.quantization.scheme import EVERY_LAYER, FLOATS_OR_E8M0, MXFP8, Scheme

BITS = (2, 3, 4, 8)
_Bits = Literal[2, 3, 4, 8]
_GroupSize = Literal[-1] | Annotated[int, Field(gt=0)]
_Names = list[str] | None
_OF_PATTERNS = re.compile(r"[*+?^$()\[\]{}|\\]")  # what no name has


def unsupported(where: str, expected: str, got: object) -> UnsupportedModelError:
    """Return the refusal of the entry ``where``."""
    return UnsupportedModelError(
        f"quantization_config.{where} of config.json: expected {expected}, got {str(got)[:300]}"
    )


def invalid(error: Exception) -> CheckpointFormatError:
    """Return the refusal for the problems that a schema found."""
    return CheckpointFormatError(f"quantization_config of config.json is invalid: {error}"[:1000])


class StoredConfig(BaseModel):
    """The entries of one ``quant_method``, and the rules that they give."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Rules:
        """Return the rules of ``quantization_config``.

        Raises ``ValidationError`` or ``UnsupportedModelError`` for entries that are not supported.
        """
        return cls(**stored).rules()

    def rules(self) -> Rules:
        raise NotImplementedError

    def _packing(self, entries: tuple[str, ...], of: tuple[str, ...]) -> str:
        """Return, in small letters, the first of ``entries`` that is there, else ``of[0]``.

        Raises ``UnsupportedModelError`` for one that is not in ``of``.
        """
        given = [each for each in entries if getattr(self, each) is not None]
        entry = given[0] if given else entries[0]
        form = str(getattr(self, entry) if given else of[0]).lower()
        if form not in of:
            raise UnsupportedModelError(
                f"quantization_config.{entry} of config.json: expected {' or '.join(of)}, "
                f"got {form!r:.100}, which packs weights in another order: convert it"
            )
        return form


def _ignored(*lists: _Names) -> list[Rule]:
    return [(target, None) for names in lists for target in names or ()]


def _parts_of_names(names: _Names) -> list[str]:
    """Return targets for entries that transformers takes for patterns, if they look like some.

    Some files have a dot at the end of a name, which says where it ends: ``model.layers.0.``
    """
    return [
        rf"re:(?:{name})(\.|\Z)"
        if _OF_PATTERNS.search(name) and name[:3] != "re:"
        else name.removesuffix(".")
        for name in names or ()
    ]


def _glob(target: str, star: str) -> str:
    """Return the pattern of ``target`` and what is below, in which a ``*`` stands for ``star``."""
    return rf"re:{re.escape(target)}(\.|\Z)".replace(r"\*", star)


class FP8Config(StoredConfig):
    """``quant_method: fp8``, as in DeepSeek-V3, Qwen3-FP8, Mistral and vLLM's own exports."""

    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[PositiveInt, PositiveInt] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    modules_to_not_convert: _Names = None
    ignored_layers: _Names = None
    kv_cache_scheme: object = None

    def rules(self) -> Rules:
        # No published checkpoint quantizes the head, and not all of them list it as ignored.
        skipped = _parts_of_names(self.modules_to_not_convert)
        ignored = _ignored(skipped, self.ignored_layers, ["lm_head"])
        kv_scales = KV_SCALES if self.kv_cache_scheme else None
        return Rules((*ignored, (EVERY_LAYER, self._scheme())), kv_scales=kv_scales)

    def _scheme(self) -> Scheme:
        block = self.weight_block_size
        if block is None and self.activation_scheme == "static":
            return Scheme("tensor", activations="static")
        if block is None:
            return Scheme("channel", or_tensor=True)  # which of them is seen in its tensors only
        if self.activation_scheme == "static":
            raise UnsupportedModelError(
                "quantization_config of config.json: static activations with a weight_block_size "
                "are not supported: expected dynamic ones"
            )
        # DeepSeek-V3.1 stores powers of two as floats, others as their exponents.
        exponents = (torch.uint8,) if self.scale_fmt == "ue8m0" else ()
        return Scheme(
            "block",
            activations="none" if block == MXFP8.block else "dynamic",
            block=block,
            scale_name="weight_scale_inv",
            scale_dtypes=FLOATS_OR_E8M0 + exponents,
        )


class FBGEMMConfig(StoredConfig):
    """``quant_method: fbgemm_fp8``, of Meta's Llama-3.1-405B-FP8: a scale for each channel.

    Inputs are not clamped at ``activation_scale_ub``, as FBGEMM does before it quantizes them.
    """

    modules_to_not_convert: _Names = None

    def rules(self) -> Rules:
        ignored = _ignored(_parts_of_names(self.modules_to_not_convert), ["lm_head"])
        return Rules((*ignored, (EVERY_LAYER, Scheme("channel"))))


class ModelOptConfig(StoredConfig):
    """``quant_method: modelopt``, or ``quantization`` of NVIDIA ModelOpt's hf_quant_config.json.

    The former lists what is left out as ``ignore``, the latter as ``exclude_modules``.
    """

    algorithms: ClassVar[dict[str, Scheme | QuantizeMethod]] = {
        "FP8": Scheme("tensor", activations="static"),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("channel", modelopt_shapes=True),
        "FP8_PB_WO": Scheme("block", activations="none", modelopt_shapes=True),
        "NVFP4": NVFP4Method(MODELOPT, static_inputs=True),
        "W4A16_NVFP4": NVFP4Method(MODELOPT, static_inputs=False),
        "MXFP8": MXFP8,
    }

    quant_algo: str
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: object = None
    exclude_modules: _Names = None
    ignore: _Names = None
    group_size: int | None = None

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Rules:
        nested = stored.get("quantization")
        return super().read(nested if isinstance(nested, Mapping) else stored)

    def rules(self) -> Rules:
        method = self.algorithms.get(self.quant_algo.upper())
        if method is None:
            expected = f"{' or '.join(self.algorithms)} of quant_method modelopt"
            raise unsupported("quant_algo", expected, self.quant_algo)
        if isinstance(method, NVFP4Method) and self.group_size not in (None, BLOCK_OF_NVFP4):
            raise unsupported("group_size", f"{BLOCK_OF_NVFP4} for NVFP4", self.group_size)
        cache = self.kv_cache_quant_algo
        if cache is not None and cache.upper() != "FP8":
            raise unsupported("kv_cache_quant_algo", "FP8 or null", cache)
        # A * stands for any part of a name, dots included (Python's fnmatch, which ModelOpt uses).
        ignored = [*(self.exclude_modules or ()), *(self.ignore or ()), "lm_head"]
        named = [f"={target}" for target in ignored if "*" not in target]  # or the fused layer's
        has_scales = cache is not None or self._is_fp8(self.kv_cache_scheme)
        return Rules(
            (*_ignored(named, [_glob(target, ".*") for target in ignored]), (EVERY_LAYER, method)),
            kv_scales=("k_proj.k_scale", "v_proj.v_scale") if has_scales else None,
            kv_scales_are_optional=True,  # it exports none where it has not calibrated the cache
        )

    @staticmethod
    def _is_fp8(scheme: object) -> bool:
        """Return whether the cache is FP8. Raises ``UnsupportedModelError`` for another one."""
        if not scheme:
            return False
        if not isinstance(scheme, Mapping) or [scheme.get(n) for n in ("num_bits", "type")] != [
            8,
            "float",
        ]:
            raise unsupported("kv_cache_scheme", "num_bits 8 and type float, or null", scheme)
        return True


class MXFP4Config(StoredConfig):
    """``quant_method: mxfp4``, of gpt-oss: only experts are quantized."""

    modules_to_not_convert: _Names = None

    def rules(self) -> Rules:
        # A * stands for one component of a name, or for a part of one.
        ignored = _ignored([_glob(each, "[^.]*") for each in self.modules_to_not_convert or ()])
        return Rules((*ignored, ("experts", MXFP4Method())))


class BitsAndBytesConfig(StoredConfig):
    """``quant_method: bitsandbytes``, as transformers writes it.

    What inputs are computed in (``bnb_4bit_compute_dtype``) and which of them are outliers
    (``llm_int8_threshold``) does not change the weights.
    """

    model_config = ConfigDict(strict=True)

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str | None = None
    llm_int8_has_fp16_weight: bool = False
    llm_int8_skip_modules: _Names = None
    modules_to_not_convert: _Names = None

    def rules(self) -> Rules:
        if self.load_in_4bit == self.load_in_8bit:
            got = f"both {str(self.load_in_4bit).lower()}"
            raise unsupported("load_in_4bit and load_in_8bit", "one of them to be true", got)
        storage = self.bnb_4bit_quant_storage
        if self.load_in_4bit and storage not in (None, "uint8"):
            raise unsupported("bnb_4bit_quant_storage", "uint8", storage)
        if self.load_in_8bit and self.llm_int8_has_fp16_weight:
            got = "true: weights in full precision"
            raise unsupported("llm_int8_has_fp16_weight", "false", got)
        method: QuantizeMethod = BitsAndBytes8BitMethod()
        if self.load_in_4bit:
            nested = self.bnb_4bit_use_double_quant
            method = BitsAndBytes4BitMethod(self.bnb_4bit_quant_type, nested=nested)
        # transformers leaves the head out unless it is given a list.
        skipped = [*(self.llm_int8_skip_modules or ()), *(self.modules_to_not_convert or ())]
        head = ["lm_head"] if self.llm_int8_skip_modules is None else []
        ignored = _ignored(_parts_of_names(skipped), head)
        # transformers 5 holds experts in modules of its own, which bitsandbytes does not quantize.
        return Rules((*ignored, (EVERY_LAYER, method)), experts_may_be_plain=True)


class _Settings(StoredConfig):
    """How a layer is quantized by GPTQ; for some layers, ``dynamic`` has other settings."""

    model_config = ConfigDict(strict=True)

    bits: _Bits = 4
    group_size: _GroupSize = 128
    desc_act: bool = False
    sym: bool = True
    pack_dtype: Literal["int32"] = "int32"

    @property
    def size(self) -> int | None:
        """How many inputs share a scale; ``None`` for all of them."""
        return None if self.group_size == -1 else self.group_size


def _in_planes(bits: object) -> UnsupportedModelError:
    return unsupported(
        "bits",
        "2, 4 or 8 with checkpoint_format gptq_p (GPTQModel), which stores codes of other sizes in "
        "planes of bits: quantize again with GPTQModel and 4 or 8 bits",
        bits,
    )


class GPTQConfig(_Settings):
    """``quant_method: gptq``, of AutoGPTQ, GPTQModel and Optimum.

    The planes of bits of ``gptq_p`` are words of ``gptq_v2`` where a code is one plane: 2, 4 and 8
    bits (GPTQModel's docs/gptq_planar.md).
    """

    bits: _Bits
    group_size: _GroupSize
    checkpoint_format: str | None = None
    format: object = None
    meta: object = None
    lm_head: bool = False
    dynamic: dict[str, dict[str, Any] | bool] | None = None
    modules_in_block_to_quantize: list[list[str] | str] | None = None

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Rules:
        form = stored.get("checkpoint_format", stored.get("format"))
        if str(form).lower() == "gptq_p" and stored.get("bits") in (3, 5, 6, 7):
            raise _in_planes(stored["bits"])
        return super().read(stored)

    def rules(self) -> Rules:
        form = self._packing(("checkpoint_format", "format"), of=("gptq", "gptq_v2", "gptq_p"))
        layout = GPTQ_V2
        if form == "gptq":
            layout = GPTQ_OF_WORDS if self._is_of_gptqmodel() else GPTQ

        def method(settings: _Settings) -> PackedMethod:
            if form == "gptq_p" and settings.bits == 3:
                raise _in_planes(settings.bits)
            ordered = settings.desc_act and settings.size is not None
            return PackedMethod(layout, settings.bits, settings.size, settings.sym, ordered)

        common = {name: getattr(self, name) for name in _Settings.model_fields}
        # Without lm_head, dynamic does not quantize it either: it only says with which settings.
        rules: list[Rule] = [] if self.lm_head else [("lm_head", None)]
        for pattern, changes in (self.dynamic or {}).items():
            kept = not pattern.startswith("-:") and changes is not False
            target = "re:" + pattern.removeprefix("-:").removeprefix("+:")
            more = changes if isinstance(changes, dict) else {}
            rules.append((target, method(_Settings(**common | more)) if kept else None))
        groups = self.modules_in_block_to_quantize
        if groups is None:
            return Rules((*rules, (EVERY_LAYER, method(self))))
        names = [name for each in groups for name in ([each] if isinstance(each, str) else each)]
        return Rules((*rules, *((name, method(self)) for name in names)))

    def _is_of_gptqmodel(self) -> bool:
        """Return whether GPTQModel wrote it: ``meta.quantizer: ["gptqmodel:2.0.0"]``."""
        writers = self.meta.get("quantizer") if isinstance(self.meta, Mapping) else None
        writers = writers if isinstance(writers, list) else [writers]
        return any(isinstance(each, str) and each.startswith("gptqmodel") for each in writers)


class AWQConfig(StoredConfig):
    """``quant_method: awq``, of AutoAWQ."""

    model_config = ConfigDict(strict=True)

    bits: Literal[4]
    group_size: _GroupSize
    checkpoint_format: str | None = None
    version: str | None = None
    format: str | None = None
    modules_to_not_convert: _Names = None

    def rules(self) -> Rules:
        # AutoAWQ calls it version, transformers 5 format, and GPTQModel checkpoint_format.
        form = self._packing(("checkpoint_format", "version", "format"), of=("gemm", "gemv"))
        size = None if self.group_size == -1 else self.group_size
        method = PackedMethod(AWQ, 4, size, symmetric=False)
        if form == "gemv":
            if size is None:
                raise unsupported("group_size", "a positive number with gemv", self.group_size)
            method = GEMVMethod(AWQ_GEMV, 4, size, symmetric=False)
        # Nobody quantizes the head, and not everybody lists it.
        ignored = _ignored(_parts_of_names(self.modules_to_not_convert), ["lm_head"])
        return Rules((*ignored, (EVERY_LAYER, method)))


class _OfAutoRound(_Settings):
    """How a layer is quantized by AutoRound; for some layers, ``extra_config`` has others."""

    data_type: Literal["int"] = "int"
    act_bits: Annotated[int, Field(ge=16)] | None = None


class AutoRoundConfig(_OfAutoRound):
    """``quant_method: auto-round``, of AutoRound; older versions wrote ``intel/auto-round``.

    They have ``backend`` in place of ``packing_format``: a layout, and a kernel for it.
    """

    layouts: ClassVar[dict[str, PackedFormat]] = {
        "auto_round:auto_gptq": GPTQ,
        "auto_round:gptq": GPTQ,
        "auto_round:gptqmodel": GPTQ_V2,
        "auto_round": GPTQ_V2,  # its own, of most weights with zeros
        "auto_round:auto_awq": AWQ,
        "auto_round:awq": AWQ,
    }

    bits: _Bits
    group_size: _GroupSize
    packing_format: str | None = None
    backend: str | None = "auto"
    block_name_to_quantize: list[str] | str | None = None
    extra_config: dict[str, dict[str, Any]] | None = None

    def rules(self) -> Rules:
        if self._form() not in self.layouts:
            advice = "export the model again to one of these, or to llm_compressor"
            expected = f"{' or '.join(self.layouts)} ({advice})"
            entry = "backend" if self.packing_format is None else "packing_format"
            raise unsupported(entry, expected, self.packing_format or self.backend)
        common = {name: getattr(self, name) for name in _OfAutoRound.model_fields}
        names: list[Rule] = []
        patterns: list[Rule] = []
        for name, changes in (self.extra_config or {}).items():
            bits, chosen = changes.get("bits"), None
            if not (isinstance(bits, int) and bits >= 16):  # more are full precision
                kept = {entry: value for entry, value in changes.items() if entry in common}
                chosen = self._method(f"extra_config.{name}.", _OfAutoRound(**common | kept))
            if _OF_PATTERNS.search(name):  # a pattern may match anywhere in a name
                anywhere = "" if name.startswith((".*", "^")) else ".*"
                patterns.append((f"re:{anywhere}(?:{name})", chosen))
            else:
                names.append((f"={name}", chosen))
        blocks = self.block_name_to_quantize or []
        blocks = blocks.split(",") if isinstance(blocks, str) else blocks
        quantized = [block.strip() for block in blocks] or [EVERY_LAYER]
        ignored = _ignored([] if "lm_head" in quantized else ["lm_head"])
        own = self._method("", self)
        return Rules((*names, *patterns, *ignored, *((target, own) for target in quantized)))

    def _form(self) -> str:
        """Return the name of the layout."""
        if self.packing_format is not None or self.backend in (None, "auto"):
            return self.packing_format or "auto_round:auto_gptq"
        layout = re.sub(":(exllamav2|tritonv2|gemm)$", "", self.backend)
        return layout if layout.startswith("auto_round") else f"auto_round:{layout}"

    def _method(self, where: str, settings: _OfAutoRound) -> PackedMethod:
        layout = self.layouts[self._form()]
        if layout is AWQ and settings.bits != 4:
            raise unsupported(f"{where}bits", f"4 with {self._form()}", settings.bits)
        # Zeros are stored always in AWQ's layout, where nothing compares them with ``sym``.
        symmetric = settings.sym and layout is not AWQ
        return PackedMethod(layout, settings.bits, settings.size, symmetric)


def gguf_rules(stored: Mapping[str, Any]) -> Rules:
    """Return what a source of GGUF files wrote: the type of each weight in blocks, by its layer."""
    types = stored.get("types")
    if not isinstance(types, Mapping) or not all(type(kind) is str for kind in types.values()):
        raise CheckpointFormatError(
            "quantization_config.types of config.json should map layers to types of GGUF files, "
            f"got {shorten(types)}: load the GGUF file itself"
        )
    methods = {kind: GGUFMethod(((None, kind),)) for kind in set(types.values())}
    rules = tuple((f"={name}", methods[kind]) for name, kind in types.items())
    return Rules(rules, joined=GGUFMethod.of_slots)

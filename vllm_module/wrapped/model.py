"""Any causal language model of transformers, as a ``vLLMModule``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm_module.core.given import Renamed, Weights
from vllm_module.core.module import vLLMModule
from vllm_module.core.planner import Planner
from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import Attention, AttentionMetadata
from vllm_module.layers.check import check
from vllm_module.parameters import BasevLLMParameter
from vllm_module.weights import Weight
from vllm_module.wrapped.attention import LAYERS, MASKED, NAME, Running, register, stepping
from vllm_module.wrapped.build import build, build_whole
from vllm_module.wrapped.chosen_tokens import choose_all
from vllm_module.wrapped.config import TransformersConfig, config_of
from vllm_module.wrapped.counted_positions import (
    TOKENS,
    Counting,
    EarlierTokens,
    counts_positions,
)
from vllm_module.wrapped.custom_code import running
from vllm_module.wrapped.inline_attention import has_stand_in
from vllm_module.wrapped.names import TransformersNames, beginnings
from vllm_module.wrapped.own_attention import divert
from vllm_module.wrapped.probe import Call, probe_of, run_on_meta
from vllm_module.wrapped.refusals import fix_frequencies, refuse_architecture, refuse_calls
from vllm_module.wrapped.replace import Replacing
from vllm_module.wrapped.trunk import find_trunk, logits_of, refuse_other_logits

# Number of tokens, at most, for which an attention method of the module's own is measured.
_MEASURED = 4096

_log = logging.getLogger(__name__)


class TransformersForCausalLM(vLLMModule):
    """A model of transformers with our linear layers, embeddings, norms, experts and attention.

    Its children are those of the transformers model, under the same names.

    Attributes:
        dtype: torch's default dtype when it was built.
        library_name: the name of transformers' class.
        replicated: share of the parameters' elements that each rank holds whole.

    Raises ``UnsupportedModelError`` for a model that would compute wrong values.

    """

    config_class = TransformersConfig

    def __init__(self, config: TransformersConfig) -> None:
        super().__init__()
        register()
        self.config = config
        self.dtype = torch.get_default_dtype()
        library_config = config_of(config.entries, config.trusted_folder)
        code_class, architecture = config.code_class, config.architectures[0]
        if code_class is not None:
            _log.info("%s is code of the checkpoint, in %s", architecture, config.trusted_folder)
        elif config.trusted_folder is not None and "auto_map" in config.entries:
            _log.info("code of the checkpoint is not run: transformers has %s", architecture)
        model = build(library_config, architecture, code_class)
        whole = None if code_class is not None else build_whole(library_config, architecture)
        refuse_architecture(model)
        if whole is not None:
            refuse_other_logits(model, whole)
        fix_frequencies(model, config.max_model_len)
        own = divert(model, min(config.max_position_embeddings or _MEASURED, _MEASURED))
        self._names = TransformersNames(model, whole)
        replacing = Replacing(model, self._names)
        replacing.replace_experts()
        self._trunk, found = find_trunk(model, takes_positions=own.takes_positions)
        calls = {found.paths[module]: each for module, each in found.calls.items()}
        refuse_calls(model, calls, config.max_model_len, own.reason)
        if found.chosen:
            choose_all(model, config.max_model_len or config.max_position_embeddings or _MEASURED)
        replacing.replace_others(calls)
        # Probe the replaced model, without masks, as it will run: shapes are this rank's.
        held, part, counting = probe_of(model), model.get_submodule(self._trunk.path), Counting()
        if not has_stand_in(model):
            held.tokens = TOKENS
        with _blamed_on_plan(replacing.plan.unused):
            with counting:
                run_on_meta(model, part, held, masks=False)
            _add_attention(calls, held.calls, held.paths, type(model).__name__)
        self._counts_positions = counts_positions(model, part, counting)
        model.config._attn_implementation = MASKED if has_stand_in(model) else NAME
        # In a tuple, so that it is no child: its children are this module's.
        self._library = (model,)
        self.library_name = type(model).__name__
        self.replicated = replicated_share(model)
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        base = model._modules.get(model.base_model_prefix)
        if whole is None and base is not None:  # a checkpoint of the base model has no prefix
            below = {name.partition(".")[0] for name in base.state_dict()} - {*self._modules}
            aliases = {name: f"{model.base_model_prefix}.{name}" for name in sorted(below)}
            self.weight_aliases = aliases
        ranks = tensor_parallel_group().size
        if ranks > 1:
            share = f"{self.replicated:.0%}"
            _log.info("each of the %d ranks holds %s of the parameters whole", ranks, share)
            if unused := replacing.plan.unused:  # for example experts that this size of model lacks
                if len(unused) == len(replacing.plan.entries):
                    raise UnsupportedModelError(
                        f"the tensor-parallel plan of {self.library_name} names nothing that it "
                        f"has: {', '.join(unused)}"
                    )
                _log.info("the plan of the class names what is not there: %s", ", ".join(unused))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Map token ids and positions, ``[tokens]`` each, to hidden states.

        Without ``metadata`` the tokens are one whole sequence.
        """
        trunk = self.get_submodule(self._trunk.path)
        more = {"past_key_values": EarlierTokens(positions)} if self._counts_positions else {}
        with running(), stepping(Running(metadata)):
            output = trunk(
                input_ids=input_ids[None],
                position_ids=positions[None],
                attention_mask=None,
                use_cache=False,
                **more,
            )
        hidden: torch.Tensor = output[0]
        return hidden[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states ``[tokens, hidden_size]`` to logits ``[tokens, vocab_size]``.

        Transformers' class computes them from its trunk's output, and may scale or cap them.
        """
        (model,) = self._library
        with running():
            return logits_of(self, model, self._trunk, hidden[None])[0]

    def check(self) -> None:
        """Raise ``UnsupportedModelError`` if the loaded model computes batches wrong."""
        check(self, self.dtype, self.config.vocab_size)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a checkpoint, with names and layout converted by transformers' rules."""
        pairs: Any = weights
        streamed = iter(pairs) is pairs
        renamed = self._renamed(pairs)
        return super().load_weights(renamed if streamed else list(renamed))

    def stored_names(self, given: Sequence[str]) -> Callable[[str], str | None]:
        """Return a function from a path to the checkpoint's name, for renamed tensors.

        Of several names, the one most like ``given`` is returned.
        """
        known = beginnings(given)
        return lambda name: self._names.closest(name, known)

    def _renamed(self, pairs: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Yield pairs under our names; each keeps the checkpoint's name for reports."""
        planner = Planner.current()
        for pair in pairs:
            named = isinstance(pair, (tuple, list)) and len(pair) == 2
            # Refused by the base class, as in any model.
            if not (named and isinstance(pair[0], str)):
                yield pair
                continue
            given, weight = pair
            parts = self._names.of(given, weight)
            if isinstance(parts, str):
                planner.skip(planner.full_name(self, given), parts)
                continue
            for each, part in parts:
                name = self._with_attention(each)
                if name != given:
                    name = Renamed(name, planner.full_name(self, given))
                yield name, part

    def _with_attention(self, name: str) -> str:
        """Return the path of a key or value scale, stored beside transformers' attention."""
        path, _, attr = name.rpartition(".")
        if attr not in ("k_scale", "v_scale"):
            return name
        layers = dict(self.named_modules()).get(f"{path}.{LAYERS}")
        return name if layers is None else f"{path}.{LAYERS}.{attr}"


@contextmanager
def _blamed_on_plan(unused: Sequence[str]) -> Iterator[None]:
    """If the block fails with several ranks, name the class's plan and its unused entries."""
    try:
        yield
    except UnsupportedModelError as error:
        size = tensor_parallel_group().size
        if size == 1:
            raise
        lacks = f", which names what is not there: {', '.join(unused)}" if unused else ""
        raise UnsupportedModelError(
            f"{error}. On one rank it runs; on {size} its tensor-parallel plan does not fit{lacks}"
        ) from error


def replicated_share(model: nn.Module) -> float:
    """Return the share of all parameters' elements that this rank holds whole."""
    whole = total = 0
    for parameter in model.parameters():
        count = parameter.numel()
        if isinstance(parameter, BasevLLMParameter):
            count = math.prod(dim.size for dim in parameter.dims)
        total += count
        whole += count if parameter.numel() >= count else 0
    return whole / max(total, 1)


def _add_attention(
    calls: dict[str, list[Call]],
    held: dict[nn.Module, list[Call]],
    paths: Any,
    owner: str,
) -> None:
    """Add our layers to each attention module for its calls, with this rank's heads."""
    size = tensor_parallel_group().size
    if [*calls] != [paths[module] for module in held]:
        raise UnsupportedModelError(f"{owner} calls attention in another order without masks")
    for module, own in held.items():
        whole = calls[paths[module]]
        layers = nn.ModuleList()
        for all_ranks, call in zip(whole, own, strict=True):
            shares = (all_ranks.heads, all_ranks.kv_heads), (call.heads, call.kv_heads)
            cut = all_ranks.heads // size, max(1, all_ranks.kv_heads // size)
            if shares[1] not in (shares[0], cut):
                raise UnsupportedModelError(
                    f"{paths[module]} attends with {shares[1]} heads of query and key on this rank "
                    f"of {size}, and with {shares[0]} on one rank: expected {cut}, or all"
                )
            layers.append(
                Attention(
                    call.heads,
                    max(call.head_size, call.value_size),
                    all_ranks.scale,
                    call.kv_heads,
                    all_ranks.rule.window,
                    all_ranks.softcap,
                    all_ranks.slopes,
                )
            )
        module.add_module(LAYERS, layers)

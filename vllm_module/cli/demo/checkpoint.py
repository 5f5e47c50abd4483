"""A small checkpoint in Hugging Face layout, trained until it generates a given paragraph."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from vllm_module.build.model_source import build_model
from vllm_module.cli.output import CommandError
from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import HFConfig

PARAGRAPH = (
    "A model is a tree, and here the tree loads itself. A name in a checkpoint is a path: each "
    "module hands it to the child that the next word names, and the parameter at the end cuts "
    "out its own shard. Queries, keys and values find their slots in one fused weight, and no "
    "table says how. Every slot is filled exactly once. What is missing is named, what is "
    "damaged is refused, and a model that is not whole does not speak."
)
PROMPT = "A model is a tree"
END = "<|endoftext|>"
_NUM_FILES = 4
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than four ranks, so ranks share them
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
_MARGIN = 3.0  # of the right token's logit; sums in another order change a logit by 1e-5
_MAX_STEPS = 1500


def write_checkpoint(folder: Path, on_loss: Callable[[float], object]) -> dict[str, Any]:
    """Train and save the checkpoint; return its configuration.

    ``on_loss`` is called with the loss of each training step.
    """
    tokenizer = _tokenizer()
    config = _CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    ids = torch.tensor([*tokenizer.encode(PARAGRAPH).ids, tokenizer.token_to_id(END)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = _random_weights(config)
    model = build_model(HFConfig(**config), torch.float32, torch.device("cpu"))
    model.load_weights(weights)
    _train(model, ids, on_loss)
    _export(model, weights)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": config["eos_token_id"], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    said = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2))
    _save(folder, weights)
    return config


def _tokenizer() -> Any:
    """Train a byte-level BPE tokenizer on the paragraph."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PARAGRAPH], trainer)
    return tokenizer


def _random_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return random weights with the names and shapes of a Qwen3 by Hugging Face."""
    hidden, mlp, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[k] * head for k in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": [hidden],
        "self_attn.q_proj": [q, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.q_norm": [head],
        "self_attn.k_norm": [head],
        "self_attn.o_proj": [hidden, q],
        "post_attention_layernorm": [hidden],
        "mlp.gate_proj": [mlp, hidden],
        "mlp.up_proj": [mlp, hidden],
        "mlp.down_proj": [hidden, mlp],
    }
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{k}.weight": shape for k, shape in layer.items()}
    shapes["model.norm.weight"] = [hidden]
    return {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.05
        for name, shape in shapes.items()
    }


def _train(model: vLLMModule, ids: torch.Tensor, on_loss: Callable[[float], object]) -> None:
    """Train until the logit of every next token of ``ids`` leads by ``_MARGIN``."""
    model.requires_grad_(True)
    causal: Any = model
    parameters = list(model.parameters())
    positions = torch.arange(len(ids) - 1)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for step in range(1, _MAX_STEPS + 1):
        logits = causal.compute_logits(model(ids[:-1], positions))
        loss = F.cross_entropy(logits, ids[1:])
        on_loss(loss.item())
        best, second = logits.detach().topk(2).values.unbind(-1)
        if (logits.argmax(-1) == ids[1:]).all() and (best - second).min() > _MARGIN:
            return
        _adam(parameters, torch.autograd.grad(loss, parameters), moments, step)
    raise CommandError(f"the demo's model did not learn the paragraph in {_MAX_STEPS} steps")


@torch.no_grad()
def _adam(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    moments: Sequence[tuple[torch.Tensor, torch.Tensor]],
    step: int,
) -> None:
    """Take one step of Adam. ``torch.optim`` would import TorchDynamo: longer than the training."""
    for parameter, gradient, (mean, square) in zip(parameters, gradients, moments, strict=True):
        mean.lerp_(gradient, 0.1)
        square.lerp_(gradient.square(), 0.001)
        scale = (square / (1 - 0.999**step)).sqrt() + 1e-8
        parameter.sub_(2e-3 / (1 - 0.9**step) * mean / scale)


@torch.no_grad()
def _export(model: vLLMModule, weights: dict[str, torch.Tensor]) -> None:
    """Copy the model's parameters back into ``weights``, following the plan backwards."""
    for each in model.plan_weights(weights).fills:
        for piece in each.pieces():
            assert isinstance(piece.source, torch.Tensor)
            piece.source.copy_(piece.target)


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    weight_map: dict[str, str] = {}
    names = list(weights)
    per_file = -(-len(names) // _NUM_FILES)
    for index in range(_NUM_FILES):
        file = f"model-{index + 1:05}-of-{_NUM_FILES:05}.safetensors"
        stored = {name: weights[name] for name in names[index * per_file :][:per_file]}
        save_file(stored, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file)
    total = sum(weight.nbytes for weight in weights.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2))

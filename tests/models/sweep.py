"""Every causal language model of transformers, tiny, in the wrapper: right, refused or wrong.

``python tests/models/sweep.py --out results.json`` tries all types, or those that it is given;
``--lot 1`` tries ten by lot, with other sizes than the table's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from vllm_module import LLM, SamplingParams
from vllm_module.build.held import load_from
from vllm_module.build.model_source import ModelSource
from vllm_module.config import ModelConfig
from vllm_module.distributed import run_ranks
from vllm_module.errors import WeightLoadError
from vllm_module.runtime.cache.kv_cache import page_bytes

VOCABULARY, TOKENS = 128, 12
TOKEN_IDS = (torch.arange(TOKENS) * 37 + 5) % (VOCABULARY - 3) + 3
TOLERANCE = 1e-4  # of logits in float32
PROMPTS = 11, 3, 1, 6, 9, 2, 5  # tokens
GENERATED, PAGE, PAGES = 32, 4, 16  # of one sequence of 64; so others are preempted

# Sizes by the names that configurations have for them.
_SIZES: dict[str, Any] = {
    64: ("hidden_size", "n_embd", "d_model", "dim", "model_dim", "embedding_size", "emb_dim"),
    2: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
        "encoder_layers", "num_key_value_heads", "num_experts_per_tok", "num_experts_per_token",
        "moe_topk", "moe_k", "top_k_experts", "num_kv_heads",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts", "sliding_window", "attention_window_size",
    ),
    16: ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "global_head_dim"),
    32: (
        "qk_head_dim", "kv_lora_rank", "q_lora_rank", "moe_intermediate_size",
        "shared_expert_intermediate_size", "expert_ffn_hidden_size", "hidden_size_per_layer_input",
    ),
    96: (
        "intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim",
        "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size",
    ),
    128: ("vocab_size", "vocab_size_per_layer_input"),
    256: ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"),
    1: ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"),
    0: ("pad_token_id", "num_nextn_predict_layers"),
}  # fmt: skip
SIZES = {name: size for size, names in _SIZES.items() for name in names} | {"eos_token_id": 2}


def types() -> list[str]:
    """Return every model type that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


_DOTS3: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": 32,
    "layer_types": ["indexed_attention", "sliding_attention"], "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"], "adapter_out_dim": 64,
    "per_layer_config": {
        1: {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
            "kv_lora_rank": 32, "head_dim": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    },
}  # fmt: skip

# Entries that only one type needs, for a small configuration that fits together.
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention"] * 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 1.5},
        "ffn_config": {
            "hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2,
        },
    },
    "dots3_note": {
        "text_config": _DOTS3
        | {
            "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0,
            "moe_intermediate_size": 32, "shared_experts_intermediate_size": 32,
            "q_lora_rank": 32, "kv_lora_rank": 32, "max_position_embeddings": 256,
            "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4,
        },
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "moe_intermediate_size": 32, "num_local_experts": 4,
            "num_experts_per_tok": 2, "adapter_in_dim": 64, "adapter_out_dim": 64,
            "mlp_layer_types": ["dense"], "per_layer_config": {},
        },
        "audio_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "downsample_hidden_size": 16, "adapter_input_size": 64,
            "adapter_out_dim": 64,
        },
    },
    "dots3_note_text": _DOTS3,
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "num_hidden_layers": 2, "intermediate_size": [96, 96],
        "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
}  # fmt: skip

# Tried in turn, until a model can be built and run; each adds to the sizes above.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 16},
    {"rotary_dim": 16, "num_key_value_heads": None},
    {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2},
    {
        "n_routed_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        "num_group": 1,
    },
    {"layer_types": None},
    {"num_key_value_heads": 4, "layer_types": None, "first_k_dense_replace": 0},
    {"num_key_value_heads": None, "head_dim": None, "layer_types": None, "sliding_window": None},
)


def tiny_config(cls: Any, **changes: Any) -> Any:
    """Return a configuration of ``cls`` with its defaults, but for small sizes.

    ``changes`` go before them: an entry that is ``None`` keeps its default.
    """
    import transformers

    default = cls().to_dict()
    given = {name: SIZES[name] for name, value in default.items()
             if name in SIZES and value is not None}  # fmt: skip
    given |= {name: value for name, value in changes.items() if name in default}
    for name, part in getattr(cls, "sub_configs", {}).items():
        is_default = default.get(name) is None and name == "vision_config"
        if name in changes or not (isinstance(default.get(name), dict) or is_default):
            continue
        if not hasattr(part, "model_type"):  # AutoConfig: the type is an entry
            kind = (default[name] or {"model_type": "siglip_vision_model"})["model_type"]
            known = transformers.CONFIG_MAPPING
            part = known[kind] if kind in known else None  # noqa: SIM401 # its get is dict's
        if part is not None:
            given[name] = tiny_config(part, **changes).to_dict()
    layers = given.get("num_hidden_layers")
    for name in ("layer_types", "mlp_layer_types"):
        kinds = default.get(name)
        if name not in changes and isinstance(kinds, list) and layers and len(kinds) >= layers:
            chosen = list(dict.fromkeys(kinds))  # one layer of each type, at least
            given[name] = (chosen * layers)[: max(layers, len(chosen))]
            given["num_hidden_layers"] = len(given[name])
    if (
        default.get("per_layer_config") is not None and "per_layer_config" not in changes
    ):  # layers with heads of another size
        given["per_layer_config"] = {
            f"{layer:02}": {"head_dim": 32}
            for layer, layer_type in enumerate(given.get("layer_types", ()))
            if layer_type == "full_attention"
        }
    kept = {name for name, value in changes.items() if value is None}
    return cls(**{name: value for name, value in given.items() if name not in kept})


def tiny_model(kind: str, **changes: Any) -> Any:
    """Return a random model of type ``kind``, of transformers, whose matrices have std 0.1.

    ``changes`` are entries of its configuration.
    """
    import transformers

    config = tiny_config(transformers.CONFIG_MAPPING[kind], **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.float().eval()


def drawn_sizes(draw: random.Random) -> dict[str, Any]:
    """Return sizes that fit together and differ from the table's, by the names of _SIZES."""
    heads, head_dim = draw.choice((6, 8)), draw.choice((8, 12, 20))
    key_value_heads = draw.choice([each for each in (2, 3, 4, heads) if heads % each == 0])
    by_size = {
        64: heads * head_dim, 4: heads, 16: head_dim, 2: draw.choice((3, 4)),
        32: draw.choice((24, 48)), 96: draw.choice((80, 144)), 128: draw.choice((131, 200)),
    }  # fmt: skip
    drawn = {name: by_size[size] for size, names in _SIZES.items() if size in by_size
             for name in names if "expert" not in name and "moe" not in name}  # fmt: skip
    drawn |= dict.fromkeys(("num_key_value_heads", "num_kv_heads"), key_value_heads)
    drawn |= dict.fromkeys(("sliding_window", "attention_window_size"), draw.choice((3, 6)))
    return drawn | {"tie_word_embeddings": draw.random() < 0.5}


def try_type(
    kind: str, sizes: tuple[int, ...] = (1, 2), drawn: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what comes of a tiny model of type ``kind``, for each tensor-parallel size.

    ``drawn`` are other sizes, of which a variant may change some so that they fit together.
    """
    ids, reasons = TOKEN_IDS, []
    variants = [{**each, **drawn} for each in _VARIANTS] if drawn else []
    for changes in (*variants, *({**(drawn or {}), **each} for each in _VARIANTS)):
        try:
            library = tiny_model(kind, **{**changes, **OWN.get(kind, {})})
            with torch.no_grad():
                expected = library(input_ids=ids[None], use_cache=False).logits[0]
            break
        except Exception as error:  # of transformers, or of sizes that do not fit together
            reasons.append(_line(error))
    else:
        return {"outcome": "not built", "reason": reasons[0]}
    with tempfile.TemporaryDirectory() as folder:
        library.save_pretrained(folder)
        tried = {str(size): _try_size(Path(folder), expected, ids, size) for size in sizes}
        if tried[str(sizes[0])]["outcome"] == "right":
            tried[str(sizes[0])]["engine"] = try_engine(Path(folder), library)
    first = tried.pop(str(sizes[0]))
    plan = bool(getattr(library, "_tp_plan", None))
    return {"class": type(library).__name__, "plan": plan, **first, "sizes": tried}


def _try_size(folder: Path, expected: torch.Tensor, ids: torch.Tensor, size: int) -> dict[str, Any]:
    config = ModelConfig(
        model=str(folder), model_impl="transformers", dtype="float32", max_model_len=64
    )

    def run(rank: int) -> torch.Tensor:
        model: Any = source.build(torch.device("cpu"))
        with source.open() as checkpoint:
            load_from(model, checkpoint)
        model.check()
        with torch.inference_mode():
            return model.compute_logits(model(ids, torch.arange(len(ids))))

    try:
        source = ModelSource.find(config)
        logits = run_ranks(size, run)[0]
    except WeightLoadError as error:
        return {"outcome": "refused", "reason": _line(error)}
    except Exception as error:  # which is a mistake of ours
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {_line(error)}"}
    if logits.shape != expected.shape:
        return {"outcome": "wrong", "reason": f"shape {tuple(logits.shape)}"}
    distance = float((logits - expected).abs().max())
    right = distance <= TOLERANCE * max(1.0, float(expected.abs().max()))
    return {"outcome": "right" if right else "wrong", "distance": distance}


def try_engine(folder: Path, library: Any) -> str:
    """Return ``"right"`` if the engine's tokens are greedy ones of ``library``, or what is wrong.

    Prompts of mixed lengths are computed together, in chunks, with too few pages for all.
    """
    config = ModelConfig(
        model=str(folder), model_impl="transformers", dtype="float32", max_model_len=64
    )
    prompts = [[(7 * at + 13 * length) % 120 + 4 for at in range(length)] for length in PROMPTS]
    try:
        page = page_bytes(ModelSource.find(config).build(torch.device("cpu")), PAGE, torch.float32)
        with LLM(
            str(folder),
            model_impl="transformers",
            dtype="float32",
            device="cpu",
            max_model_len=64,
            skip_tokenizer_init=True,
            block_size=PAGE,
            kv_cache_memory_bytes=PAGES * page,
            max_num_batched_tokens=8,
        ) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True),
                use_tqdm=False,
            )
            preempted = llm.engine.scheduler.preemptions
    except Exception as error:
        return f"{type(error).__name__}: {_line(error)}"
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = torch.tensor([*prompt, *output.outputs[0].token_ids])
        with torch.no_grad():  # all tokens at once: each is the greedy one after those before it
            logits = library(input_ids=tokens[None], use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        chosen = logits.gather(-1, tokens[len(prompt) :, None])[:, 0]
        most = logits.max(-1).values
        if len(chosen) != GENERATED or bool((most - chosen > TOLERANCE * most.abs().max()).any()):
            return f"tokens of the prompt of {len(prompt)} are not greedy"
    # Where all layers have windows, pages before them are freed, and they may suffice.
    return "right" if preempted else "right, without preemption"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# What reasons have in common, and what they are called in the table.
_REASONS = {
    "recurrent state": "recurrent state",
    "encoder-decoder": "part of an encoder-decoder, or cross attention",
    "is_causal is false": "an encoder: tokens attend to later ones",
    " 0 times": "computes attention itself, in a way that is not understood",
    "takes no position_ids": "takes no position_ids",
    "a mask of its own": "a mask of its own",
    "block_indices in the call": "attention to chosen blocks of tokens",
    "without values": "branches on values, so that it cannot be probed",
}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the outcomes in Markdown: how many types, and which."""
    rows: dict[str, list[str]] = {}
    for kind, result in sorted(results.items()):
        outcome, sizes = result["outcome"], result.get("sizes", {})
        if outcome == "right":
            ranks = [size for size, each in sizes.items() if each["outcome"] == "right"]
            wrong = [size for size, each in sizes.items() if each["outcome"] != "refused"]
            name = f"right on {', '.join(['1', *ranks])} ranks"
            name += "" if ranks == wrong else "; WRONG on others"
            name += (
                ""
                if result["engine"].startswith("right")
                else f"; ENGINE: {result['engine'][:100]}"
            )
        else:
            known = (text for part, text in _REASONS.items() if part in result["reason"])
            name = f"{outcome}: {next(known, result['reason'][:100])}"
        rows.setdefault(name, []).append(kind)
    lines = [f"| {name} | {len(kinds)} | {', '.join(kinds)} |" for name, kinds in rows.items()]
    return "\n".join(["| outcome | types | which |", "|---|---|---|", *sorted(lines)])


class _TooLong(BaseException):  # no error that a model's code could handle
    pass


def _stop(*_: object) -> None:
    raise _TooLong("it takes longer than a minute")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lot", type=int, help="a seed: draw ten types, and sizes for each")
    asked = parser.parse_args()
    draw = None if asked.lot is None else random.Random(asked.lot)
    chosen = draw.sample(types(), 10) if draw else asked.types or types()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _stop)
    results = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    for kind in chosen:
        drawn = drawn_sizes(draw) if draw else None
        signal.alarm(60)
        begin = time.monotonic()
        try:
            results[kind] = try_type(kind, tuple(asked.sizes), drawn)
        except (Exception, _TooLong) as error:
            results[kind] = {"outcome": "failed", "reason": _line(error)}
        signal.alarm(0)
        each = results[kind]
        more = {size: one["outcome"] for size, one in each.get("sizes", {}).items()}
        detail = each.get("reason", each.get("distance"))
        more |= {"engine": each["engine"]} if "engine" in each else {}
        seconds = f"{time.monotonic() - begin:.1f} s"
        print(f"{kind:28} {each['outcome']:9} {more or ''} {seconds} {detail}", flush=True)
        if drawn:
            print(f"{'':28} {drawn}")
        if asked.out:
            asked.out.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()

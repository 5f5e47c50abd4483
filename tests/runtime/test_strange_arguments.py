"""Strange arguments and files are refused at once, by messages that say what to change."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.build.model_source import build_model
from vllm_module.build.registry import registered
from vllm_module.config import DeviceConfig, EngineConfig, LoadConfig, QuantizationConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.models.llama import LlamaForCausalLM
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.testing import random_weights, write_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "max_position_embeddings": 64,
}
SMALL: Any = {"kv_cache_memory_bytes": 1 << 20, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    model = build_model(HFConfig(**CONFIG), torch.float32, torch.device("cpu"))
    write_checkpoint(folder, random_weights(model.expected_weights(), seed=0), config=CONFIG)
    return folder


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (24, "24"),
        (3, "3"),
        (10**6, r"tensor_parallel_size is 1000000.*this machine starts at most"),
    ],
)
def test_no_process_is_started_for_ranks_that_do_not_fit(
    folder: Path, size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank finds that the model cannot be divided before it starts other processes."""
    # A call of it would be a TypeError.
    monkeypatch.setattr("vllm_module.runtime.ranks.group.Processes", None)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), tensor_parallel_size=size, **SMALL)


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {chr(64 + token): token for token in range(32)},
        "unk_token": "A",
    },
}
SECOND = [{"Sequence": {"id": "B", "type_id": 0}}]
UNREADABLE = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}
NOT_ENCODING: dict[str, dict[str, Any]] = {
    "length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "template of pairs": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": SECOND,
            "pair": [],
            "special_tokens": {},
        }
    },
    "no unknown token": {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}},
}
NOT_DECODING = {"decoder": {"type": "Strip", "content": "A", "start": 5, "stop": 5}}


def write_tokenizer(folder: Path, entries: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | entries))
    return folder


def test_a_tokenizer_that_panics_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """A panic of the library, which is no Exception, is an error that names the file."""
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json cannot be read: Panic"):
        Tokenizer(write_tokenizer(tmp_path, UNREADABLE))


@pytest.mark.parametrize("case", NOT_ENCODING)
def test_a_tokenizer_that_fails_on_a_text_refuses_it(case: str, tmp_path: Path) -> None:
    """Whatever the library raises, the prompt gets a ValueError."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, NOT_ENCODING[case]))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot encode 'z z': "):
        tokenizer.encode("z z")


def test_half_of_a_surrogate_pair_is_refused_by_name(tmp_path: Path) -> None:
    """The message has the character and its position."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, {}))
    with pytest.raises(ValueError, match=r"has '\\ud800' at position 1, which is half"):
        tokenizer.encode("a\ud800")


def test_an_interrupt_of_the_tokenizer_is_not_converted(tmp_path: Path) -> None:
    """KeyboardInterrupt passes."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, {}))

    class Interrupting:
        def decode(self, *_: object, **__: object) -> str:
            raise KeyboardInterrupt

    tokenizer._tokenizer = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.decode([1])


def test_a_tokenizer_that_fails_on_tokens_ends_only_requests(folder: Path, tmp_path: Path) -> None:
    """Requests, streamed or not, get the error; tokens are returned, and the engine goes on."""
    write_tokenizer(tmp_path, NOT_DECODING)
    # The decoder fails on a single token, but not on none.
    prompt = {"prompt_token_ids": [1]}
    with LLM(str(folder), tokenizer=str(tmp_path), **SMALL) as llm:
        for params in (
            SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1),
            SamplingParams(max_tokens=3, n=2, stop="x"),
        ):
            for _ in range(2):
                (output,) = llm.generate(prompt, params, use_tqdm=False)
                assert output.error is not None
                assert "tokenizer.json cannot decode tokens: PanicException" in output.error
                assert {each.finish_reason for each in output.outputs} == {"error"}
                assert not llm.engine.requests


SETTINGS: list[tuple[Any, dict[str, Any], str]] = [
    (
        ModelConfig,
        {"model": "x", "max_model_len": -1, "hf_overrides": [1]},
        "max_model_len should be greater than 0, got -1\n"
        "hf_overrides should be a valid dictionary, got [1]",
    ),
    (ModelConfig, {}, "model is missing: ModelConfig needs it"),
    (
        ModelConfig,
        {"model": "x", "quantization": {"scheme": "fp8_per_block", "weight_block_size": [0, 1]}},
        "weight_block_size[0] should be greater than 0, got 0",
    ),
    (
        ModelConfig,
        {"model": "x", "hf_token": [b"secret"]},
        "hf_token should be a valid string, or be a valid boolean, got another type",
    ),
    (
        LoadConfig,
        {"timeoutt": 1.0},
        "LoadConfig has no argument 'timeoutt': did you mean 'timeout'?",
    ),
    (EngineConfig, {"block_size": 2.5}, "block_size should be a valid integer, got 2.5"),
    (DeviceConfig, {"device": 5}, "device should be a valid string, got 5"),
    (
        QuantizationConfig,
        {"scheme": "fp8_per_block", "overrides": {"x": 1}},
        "overrides should be 'fp8_per_tensor'",
    ),
    (SamplingParams, {"stop": ["a", ""]}, "stop[1] should have at least 1 character, got ''"),
    (SamplingParams, {"n": 0}, "n should be greater than or equal to 1, got 0"),
    (
        SamplingParams,
        {"best_of": 3},
        "SamplingParams(best_of=3) of vLLM is not supported here: leave it out, or give 1",
    ),
    (
        SamplingParams,
        {"temprature": 1},
        "SamplingParams has no argument 'temprature': did you mean 'temperature'?",
    ),
    (
        SamplingParams,
        {"min_tokens": 9, "max_tokens": 1},
        "min_tokens should be at most max_tokens, which is 1, and is 9",
    ),
]


@pytest.mark.parametrize(("kind", "given", "expected"), SETTINGS)
@pytest.mark.parametrize("way", ["constructor", "model_validate"])
def test_errors_of_settings_are_in_plain_words(
    way: str, kind: Any, given: dict[str, Any], expected: str
) -> None:
    """A line for each problem names the setting, what was expected and what came."""
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        kind(**given) if way == "constructor" else kind.model_validate(given)
    assert type(caught.value) is ValueError
    text = str(caught.value)
    assert "pydantic" not in text
    assert "validation error" not in text
    assert "secret" not in text


@pytest.mark.parametrize("kind", [LoadConfig, SamplingParams])
@pytest.mark.parametrize("given", [None, 5, [1]])
def test_settings_are_a_mapping(kind: Any, given: Any) -> None:
    """Another type is refused by name; an instance is returned as it is."""
    with pytest.raises(ValueError, match=f"^{kind.__name__} should be a mapping.*, got "):
        kind.model_validate(given)
    assert kind.model_validate(kind()) == kind()


NUMBERS = torch.tensor([1, 2])
ARGUMENTS: list[tuple[str, Any, str]] = [
    ("dtype", [1], "dtype should be 'auto', .*, got \\[1\\]"),
    ("dtype", {}, "dtype should be 'auto', .*, got {}"),
    ("hf_overrides", 5, "hf_overrides should be a valid dictionary, got 5"),
    ("hf_overrides", [1], "hf_overrides should be a valid dictionary, got \\[1\\]"),
    ("seed", [1], "seed should be an integer or None, got \\[1\\]"),
    ("seed", "x", "seed should be an integer or None, got 'x'"),
    ("seed", True, "seed should be an integer or None, got True"),
    ("max_logprobs", None, "max_logprobs should be an integer from -1, got None"),
    ("max_logprobs", "x", "max_logprobs should be an integer from -1, got 'x'"),
    ("max_logprobs", -2, "max_logprobs should be an integer from -1, got -2"),
    ("skip_tokenizer_init", "x", "skip_tokenizer_init should be True or False, got 'x'"),
    ("generation_config", NUMBERS, "generation_config should be 'auto', .*, got tensor"),
    ("device", "meta", "device 'meta' has no memory"),
    ("device", 5, "device should be a valid string, got 5"),
    ("enable_lora", NUMBERS, r"LLM\(enable_lora=tensor.*is not supported here: .*or give False"),
    ("load_config", 0, "LoadConfig should be a mapping of settings, got 0"),
    ("max_model_len", True, "max_model_len should be a valid integer, got True"),
    ("max_model_len", "5", "max_model_len should be a valid integer, got '5'"),
    ("block_size", True, "block_size should be a valid integer, got True"),
    ("swap_space", "1", "swap_space should be a valid number, got '1'"),
    ("enforce_eager", "no", "enforce_eager should be a valid boolean, got 'no'"),
]


@pytest.mark.parametrize(("name", "value", "message"), ARGUMENTS)
def test_arguments_of_another_type_are_refused(
    name: str, value: Any, message: str, folder: Path
) -> None:
    """The message names the argument, what was expected and what came."""
    with pytest.raises(ValueError, match=f"^{message}"):
        LLM(str(folder), **{**SMALL, name: value})


def test_an_update_without_weights_is_refused(folder: Path) -> None:
    """Nor is a path one: the message has the function that opens it."""
    with LLM(str(folder), **SMALL) as llm:
        for given in (None, folder, llm.executor.worker.model):
            with pytest.raises(ValueError, match=r"^weights should be names .*open_update opens"):
                llm.update_weights(given)  # type: ignore[arg-type]  # on purpose
        assert llm.weight_version == "0"


def test_strange_arguments_of_a_chat_are_refused(folder: Path) -> None:
    """Templates are text and their variables a mapping."""
    hello = [{"role": "user", "content": "A"}]
    strange: list[tuple[dict[str, Any], str]] = [
        ({"chat_template_kwargs": 5}, "chat_template_kwargs should be a mapping .*, got 5"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs should be a mapping .*, got "),
        ({"chat_template": 5}, "chat_template should be text or None, got 5"),
    ]
    with LLM(str(folder), **SMALL) as llm:
        for arguments, message in strange:
            with pytest.raises(ValueError, match=message):
                llm.chat(hello, use_tqdm=False, **arguments)


class Wider(LlamaForCausalLM):
    """Returns one column too many."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(super().compute_logits(hidden), (0, 1))


class Flat(LlamaForCausalLM):
    """Returns logits without rows."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden).flatten()


class Nothing(LlamaForCausalLM):
    """Returns no logits."""

    def compute_logits(self, hidden: torch.Tensor) -> Any:
        return None


class Headless(LlamaForCausalLM):
    """Returns no hidden states."""

    def forward(self, *arguments: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Wider, r"Wider.compute_logits should .* \(1, 32\), .*, and returned shape \(1, 33\)"),
        (Flat, r"Flat.compute_logits should .* \(1, 32\), .*, and returned shape \(32,\)"),
        (Nothing, r"Nothing.compute_logits should .*, and returned None"),
        (Headless, r"Headless.forward should .* \(1, hidden_size\), and returned None"),
    ],
)
def test_results_of_a_model_that_are_no_logits_are_refused(
    kind: Any, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the model's class, the shape that was expected and what came."""
    monkeypatch.setitem(registered.models_by_call, "LlamaForCausalLM", kind)
    with (
        LLM(str(folder), **SMALL) as llm,
        pytest.raises(UnsupportedModelError, match=message),
    ):
        llm.generate({"prompt_token_ids": [1]}, use_tqdm=False)


ENTRIES: dict[str, dict[str, Any]] = {
    "enable_eplb": {"enable_eplb": True},
    "enable_return_routed_experts": {"enable_return_routed_experts": True},
    "enable_torch_compile": {"enable_torch_compile": True},
    "pipeline_parallel_size": {"pipeline_parallel_size": 2},
    "data_parallel_size": {"data_parallel_size": 2, "data_parallel_rank": 1},
    **{
        f"distributed_executor_backend='{backend}'": {"distributed_executor_backend": backend}
        for backend in ("mp", "ray", "uni", "external_launcher")
    },
}
NOT_TOGETHER: dict[str, tuple[str, ...]] = {
    "enable_eplb": ("enable_torch_compile",),
    "enable_return_routed_experts": ("pipeline_parallel_size", "enable_torch_compile"),
    "data_parallel_size": (
        "pipeline_parallel_size", "enable_torch_compile", "enable_eplb",
        "distributed_executor_backend='ray'", "distributed_executor_backend='external_launcher'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(ENTRIES, 2)])
def test_entries_that_do_not_go_together(one: str, other: str) -> None:
    """Both are named; all other pairs are accepted."""
    given = ENTRIES[one] | ENTRIES[other]
    if other in NOT_TOGETHER.get(one, ()):
        with pytest.raises(ValueError, match=f"{one} does not go with {other}: leave one"):
            EngineConfig(**given)
    elif one not in NOT_TOGETHER.get(other, ()):
        EngineConfig(**given)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (ModelConfig, "ModelConfig(model=...)"),
        (LoadConfig, "LoadConfig(load_format=...)"),
    ],
)
def test_values_without_a_name_are_refused_with_the_names(call: Any, named: str) -> None:
    """The names are those that the signature asks for."""
    with pytest.raises(TypeError, match=rf"takes its settings by name: {re.escape(named)}$"):
        call("ckpt")

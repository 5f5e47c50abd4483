"""Sources of a user's own: anything with a folder and weights, under a URL scheme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module import LLM, DeviceConfig, ModelConfig, SamplingParams, get_model
from vllm_module.build.model_source import build_model
from vllm_module.build.registry import load_model_code
from vllm_module.config import LoadConfig
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, WeightLoadError
from vllm_module.models.llama import LlamaConfig
from vllm_module.testing import random_weights, write_checkpoint
from vllm_module.weights import open_checkpoint, source
from vllm_module.weights.joined import JoinedWeights
from vllm_module.weights.source import Folder, find_source, register_source, registered_sources

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
CPU = DeviceConfig(device="cpu")
FILE = Path(__file__).with_name("bucket_source.py")
load_model_code(FILE)
Bucket: Any = registered_sources.pop("bucket")


@pytest.fixture(autouse=True)
def _sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register one source, and forget what a test adds."""
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(source, "registered_sources", {"bucket": Bucket})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    model = build_model(LlamaConfig(**CONFIG), torch.float32, torch.device("cpu"))
    write_checkpoint(folder, random_weights(model.expected_weights(), seed=0), config=CONFIG)
    return folder


def test_a_url_of_a_registered_scheme_is_a_model(folder: Path) -> None:
    """The model has the same bits as from the folder, with a progress bar too."""
    config, url = ModelConfig(model=str(folder)), ModelConfig(model=f"bucket://{folder}")
    expected = get_model(model_config=config, device_config=CPU).state_dict()
    load = LoadConfig(show_progress=True)
    found = get_model(model_config=url, load_config=load, device_config=CPU).state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_rank_reads_only_what_it_keeps(folder: Path) -> None:
    """A handle is narrowed before it is read: two ranks together read each tensor about once."""
    sources: list[Any] = []

    def opener(url: str) -> Any:
        sources.append(Bucket(url.replace("COUNTED", "bucket")))
        return sources[-1]

    register_source("Counted", opener)
    model_config = ModelConfig(model=f"COUNTED://{folder}")
    run_ranks(2, lambda rank: get_model(model_config=model_config, device_config=CPU))
    assert len(sources) == 2
    read = sum(sum(each.reads) for each in sources)
    assert read < 1.1 * open_checkpoint(folder).nbytes  # the norms are read twice


def test_ranks_in_other_processes_open_the_source(folder: Path) -> None:
    """An engine generates the same from a URL at TP 2 as from the folder, also after waking up."""

    def tokens(model: str, size: int) -> list[list[int]]:
        with LLM(
            model, device="cpu", tensor_parallel_size=size, kv_cache_memory_bytes=1 << 18
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            prompt = {"prompt_token_ids": [1, 2, 3]}
            first = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
            llm.sleep()
            llm.wake_up()
            second = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
            return [first, second]

    assert tokens(f"bucket://{folder}", 2) == tokens(str(folder), 1)


class _Twice(Bucket):
    def weights(self) -> Iterator[tuple[str, Any]]:
        yield from super().weights()
        yield from super().weights()


class _Short(Bucket):
    def weights(self) -> Iterator[tuple[str, Any]]:
        return iter(list(super().weights())[1:])


@pytest.mark.parametrize(
    ("opener", "error", "message"),
    [
        (_Twice, CheckpointFormatError, "yields the tensor 'model.norm.weight' twice"),
        (_Short, WeightLoadError, "missing 1"),
        (
            lambda url: None,
            CheckpointFormatError,
            r"should return an object with folder, a pathlib\.Path",
        ),
        (lambda url: url, CheckpointFormatError, "and weights"),
    ],
)
def test_a_source_that_breaks_its_promise_is_refused(
    folder: Path, opener: Any, error: type[Exception], message: str
) -> None:
    """A name that comes twice, a missing tensor, and what is no source."""
    register_source("bucket", opener)
    with pytest.raises(error, match=message):
        get_model(model_config=ModelConfig(model=f"bucket://{folder}"), device_config=CPU)


class _Odd:
    """A handle whose parts are given; ``read`` and the like are never called."""

    def __init__(self, shape: Any = (2,), dtype: Any = torch.float32, narrow: Any = print) -> None:
        self.shape, self.dtype, self.narrow = shape, dtype, narrow
        self.read = self.read_into = print


NO_WEIGHTS = {
    "nothing": (None, "has no weights: .*, got None"),
    "a number": (5, "has no weights: .*, got 5"),
    "text": ("abc", "should yield pairs of name and tensor, got 'a'"),
    "pairs of letters": (["ab"], "should yield pairs of name and tensor, got 'ab'"),
    "numbers": ([1], "should yield pairs of name and tensor, got 1"),
    "triples": ([("x", 1, 2)], r"should yield pairs of name and tensor, got \('x', 1, 2\)"),
    "a name that is a number": ({1: torch.ones(1)}, "a string of at most 1024 characters, got 1"),
    "bytes for a name": ([(b"x", _Odd())], "a string of at most 1024 characters, got b'x'"),
    "a list for a name": ([([], _Odd())], r"a string of at most 1024 characters, got \[\]"),
    "a long name": ([("x." * 513, _Odd())], "a string of at most 1024 characters, got 'x.x"),
    "no tensor": ({"x": None}, "the tensor 'x' should be a torch.Tensor or a handle .*, got None"),
    "an int": ({"x": 3}, "the tensor 'x' should be a torch.Tensor or a handle .*, got 3"),
    "a list": ({"x": [1.0]}, r"the tensor 'x' should be a torch.Tensor .*, got \[1.0\]"),
    "no narrow": ({"x": _Odd(narrow=None)}, "the tensor 'x' should be .* handle with shape"),
    "no shape": ({"x": _Odd(None)}, "the tensor 'x' should have a tuple of sizes .*, got None"),
    "a float shape": ({"x": _Odd(2.0)}, "'x' should have a tuple of sizes .*, got 2.0"),
    "float sizes": ({"x": _Odd((2.0,))}, r"'x' should have a tuple of sizes .*, got \(2.0,\)"),
    "negative sizes": ({"x": _Odd((-1,))}, "'x' should have a tuple of sizes"),
    "endless sizes": ({"x": _Odd((1 << 70,))}, "'x' should have a tuple of sizes"),
    "no dtype": ({"x": _Odd(dtype="F32")}, "'x' should have a torch.dtype .*, got 'F32'"),
}


@pytest.mark.parametrize(("weights", "message"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_what_is_no_weight_is_refused(folder: Path, weights: Any, message: str) -> None:
    """The refusal has the source's folder and the tensor; what was opened is closed."""
    closed: list[bool] = []
    if isinstance(weights, dict):
        weights = type("Weights", (dict,), {"close": lambda _: closed.append(True)})(weights)

    class Odd(Bucket):
        def weights(self) -> Any:
            return weights

    register_source("bucket", Odd)
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        get_model(model_config=ModelConfig(model=f"bucket://{folder}"), device_config=CPU)
    assert f"the source of {folder}" in str(refused.value)
    assert len(closed) == isinstance(weights, dict)


@pytest.mark.parametrize("model", ["ftp://a/b", "://", "file:///tmp"])
def test_an_unknown_scheme_is_refused(model: str) -> None:
    """The refusal names the schemes that are registered and what to call."""
    with pytest.raises(CheckpointFormatError, match=r"known: az://, bucket://.*register_source"):
        find_source(model)


@pytest.mark.parametrize("scheme", ["", "s3://", "a b", "3s", None])
def test_a_scheme_is_a_word(scheme: Any) -> None:
    """Another scheme, or an opener that cannot be called, is refused at once."""
    with pytest.raises(ValueError, match="scheme should be a word"):
        register_source(scheme, Bucket)
    with pytest.raises(TypeError, match="should be called with a URL"):
        register_source("s3", "Bucket")  # type: ignore[arg-type]  # what is tested


def test_names_of_two_sources_meet_below_a_prefix(tmp_path: Path) -> None:
    """Each name begins with its source's path, and a full name that both have is refused."""
    for folder, name in (("a", "tower.w"), ("b", "w"), ("c", "v")):
        (tmp_path / folder).mkdir()
        save_file({name: torch.full((2,), float(ord(folder)))}, tmp_path / folder / "m.safetensors")
    a, b, c = (Folder(tmp_path / each) for each in "abc")
    with closing(JoinedWeights([("", a), ("tower", c), ("head", b)])) as joined:
        values = {name: weight.read()[0].item() for name, weight in joined}
    assert values == {"tower.w": 97, "tower.v": 99, "head.w": 98}
    twice = JoinedWeights([("", a), ("tower", b)])
    with closing(twice), pytest.raises(CheckpointFormatError, match=r"'tower\.w' is in "):
        list(twice)

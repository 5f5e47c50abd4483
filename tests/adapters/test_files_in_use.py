"""Files of adapters that change while they are read, or under a base that was updated."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from vllm_module import LLM, LoRARequest, SamplingParams
from vllm_module.adapters import file_versions
from vllm_module.errors import WeightLoadError, WeightReadError
from vllm_module.runtime.ranks import worker_weights

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
adapt, small_model = SUPPORT["adapt"], SUPPORT["small_model"]
imported = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["imported"]
# Of what transformers has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
COUNT = 6
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
PROMPT = [(7 * i + 3) % 60 for i in range(10)]
TARGETS = {"a": ["k_proj", "down_proj"], "other": ["k_proj", "down_proj"], "b": ["q_proj"]}
TARGETS["embedding"] = ["embed_tokens", "q_proj"]
FILE = "adapter_model.safetensors"
# What every rank can import: rank 0 reads an adapter, then it is replaced, then others read it.
PLANTED = """
import shutil
import time
from pathlib import Path


def read_in_turn(worker, other):
    right = worker.load_adapter

    def load(number, path, *given):
        worker.load_adapter, mark = right, Path(path, "read")
        if worker.rank:
            while not mark.exists():
                time.sleep(0.01)
            shutil.copytree(other, path, dirs_exist_ok=True)
            return right(number, path, *given)
        found = right(number, path, *given)
        mark.touch()
        return found

    worker.load_adapter = load
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model and adapters of it; of two with the same shapes, and of its embedding."""
    path = tmp_path_factory.mktemp("files")
    small_model("llama", path / "base")
    for number, (name, targets) in enumerate(TARGETS.items()):
        model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
        alpha = 1 if name == "embedding" else 16  # which leaves the base's embedding a part
        adapt(model, path / name, number, target_modules=targets, lora_alpha=alpha)
    assert any(".base_layer.weight" in name for name in load_file(path / "embedding" / FILE))
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[..., list[int]]:
    """Return what PEFT generates; with another embedding of the base, if that is updated."""

    @cache
    @torch.no_grad()
    def tokens(name: str | None, *, updated: bool = False) -> list[int]:
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, folder / name).eval()
        if updated:
            (weight,) = (p for n, p in model.named_parameters() if is_embedding(n))
            weight.copy_(weight.flip(0).clone())
        ids = list(PROMPT)
        for _ in range(COUNT):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]

    return tokens


def is_embedding(name: str) -> bool:
    return "embed_tokens" in name and name.endswith("weight") and "lora" not in name


def flipped(folder: Path) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "base" / "model.safetensors")
    return {n: each.flip(0).contiguous() for n, each in stored.items() if is_embedding(n)}


@pytest.fixture(scope="module")
def read_in_turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("planted") / "planted_in_files.py"
    with imported(path, PLANTED) as module:
        yield module.read_in_turn


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder / "base"),
        **{"kv_cache_memory_bytes": 1 << 20, "dtype": "float32", "block_size": 4} | settings,
    )


def answers(llm: LLM, *names: Any) -> list[Any]:
    """Return tokens, or the error of a request that ends with one."""
    prompts = [{"prompt_token_ids": PROMPT} for _ in names]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=list(names))
    return [output.error or list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("changed", [FILE, "adapter_config.json"])
def test_changed_while_it_is_read(
    folder: Path, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Neither half of two adapters is served, at the first load and at later ones."""
    shutil.copytree(folder / "a", tmp_path / "a")
    right, replaced = worker_weights.open_adapter, []

    @contextmanager
    def opened(path: Any) -> Iterator[Any]:
        with right(path) as found:
            if Path(path).parent == tmp_path:  # as a program that saves a new version does it
                shutil.copy(folder / "other" / changed, tmp_path / "new")
                os.replace(tmp_path / "new", Path(path, changed))
                replaced.append(path)
            yield found

    with load(folder, max_loras=1, max_cpu_loras=1) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(worker_weights, "open_adapter", opened)
            with pytest.raises(WeightReadError, match="has changed while it was read: load it"):
                llm.load_adapter("a", tmp_path / "a")
        assert len(replaced) == 1
        assert not llm.list_adapters()
        shutil.copytree(folder / "a", tmp_path / "a", dirs_exist_ok=True)
        llm.load_adapter("a", tmp_path / "a")
        llm.load_adapter("b", folder / "b")
        with monkeypatch.context() as patch:
            patch.setattr(worker_weights, "open_adapter", opened)
            base, broken, other = answers(llm, None, "a", "b")
        assert [base, other] == [expected(None), expected("b")]
        assert "has changed while it was read" in broken
        assert len(replaced) == 2


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def touched(file: Path) -> None:
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replaced(file: Path) -> None:
    """Put a copy in its place, with the same bytes and time."""
    shutil.copy2(file, file.with_name("new"))
    os.replace(file.with_name("new"), file)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("change", [longer, touched, replaced, Path.unlink])
@pytest.mark.parametrize("stored", [FILE, "adapter_model.bin"])
@pytest.mark.parametrize("of_weights", [False, True])
def test_any_change_of_a_file_is_another_version(
    tmp_path: Path, of_weights: bool, stored: str, change: Callable[[Path], Any], linked: bool
) -> None:
    """It is told of settings and tensors, in either format, and of what a link leads to."""
    files = tmp_path / "files"
    files.mkdir()
    for name in ("adapter_config.json", stored):
        (files / name).write_bytes(b"{}")
    folder = files
    if linked:
        folder = tmp_path / "links"
        folder.mkdir()
        for name in ("adapter_config.json", stored):
            (folder / name).symlink_to(files / name)
    before = file_versions(folder)
    (folder / "README.md").write_text("no part of it")
    assert file_versions(folder) == before
    change(files / (stored if of_weights else "adapter_config.json"))
    assert file_versions(folder) != before


def test_replaced_between_two_ranks(
    folder: Path, tmp_path: Path, expected: Any, read_in_turn: Any
) -> None:
    """Half of one adapter and half of another are refused, at the first load as well."""
    shutil.copytree(folder / "a", tmp_path / "a")
    with load(folder, tensor_parallel_size=2) as llm:
        llm.collective_rpc(read_in_turn, args=(folder / "other",))
        with pytest.raises(WeightReadError, match="are not the same on all ranks"):
            llm.load_adapter("a", tmp_path / "a")
        assert not llm.list_adapters()
        llm.load_adapter("a", tmp_path / "a")
        assert answers(llm, "a", None) == [expected("other"), expected(None)]


def test_copies_of_a_base_that_is_updated(folder: Path, expected: Any, tmp_path: Path) -> None:
    """What was accepted is taken again: copies of the base are compared at the first load."""
    with load(folder, max_loras=1, max_cpu_loras=1) as llm:
        llm.load_adapter("embedding", folder / "embedding")
        assert answers(llm, "embedding") == [expected("embedding")]
        llm.update_weights(flipped(folder))
        llm.reset_prefix_cache()
        wanted = expected("embedding", updated=True)
        assert wanted != expected("embedding")
        assert answers(llm, "embedding") == [wanted]
        llm.load_adapter("b", folder / "b")
        assert [each.in_memory for each in llm.list_adapters()] == [False, True]
        assert answers(llm, "embedding") == [wanted]
        llm.reshard(2)
        assert answers(llm, "b", "embedding") == [expected("b", updated=True), wanted]
        shutil.copytree(folder / "embedding", tmp_path / "trained")
        settings = json.loads((tmp_path / "trained/adapter_config.json").read_text())
        settings |= {"peft_version": "9.9", "base_model_name_or_path": "/elsewhere"}
        (tmp_path / "trained/adapter_config.json").write_text(json.dumps(settings))
        llm.update_adapter("embedding", tmp_path / "trained")
        assert answers(llm, "embedding") == [wanted]
        shutil.copytree(folder / "embedding", tmp_path / "copy")
        with pytest.raises(WeightLoadError, match="is another one than the base model's"):
            llm.load_adapter("again", tmp_path / "copy")


def test_ranks_that_do_not_take_over(folder: Path, expected: Any) -> None:
    """After a refused change of the number of ranks, adapters are known as they were."""
    with load(folder, max_loras=1, max_cpu_loras=1) as llm:
        llm.load_adapter("a", folder / "a")
        stream = llm.serve([{"prompt_token_ids": PROMPT, "adapter": "a"}], PARAMS, every_token=True)
        next(stream)
        llm.load_adapter("b", folder / "b")  # beside one that is used

        def known() -> list[tuple[Any, ...]]:
            return [(each.num_bytes, each.used, each.in_memory) for each in llm.list_adapters()]

        before = known()
        (request,) = llm.engine.requests.values()
        request.max_len += 1 << 20  # which no cache has room for
        with pytest.raises(ValueError, match="a running request may have"):
            llm.reshard(2)
        request.max_len -= 1 << 20
        assert known() == before
        *_, (_, output) = stream
        assert list(output.outputs[0].token_ids) == expected("a")
        assert answers(llm, "b", "a") == [expected("b"), expected("a")]


def test_others_stay_until_a_new_one_is_there(folder: Path, tmp_path: Path) -> None:
    """An adapter that is refused costs no other its place in memory."""
    shutil.copytree(folder / "a", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text()) | {"r": 3}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    with load(folder, max_loras=1, max_cpu_loras=1) as llm:
        llm.load_adapter("b", folder / "b")
        with pytest.raises(WeightLoadError):
            llm.load_adapter("a", tmp_path / "a")
        assert [each.in_memory for each in llm.list_adapters()] == [True]
        llm.load_adapter("a", folder / "a")
        assert [each.in_memory for each in llm.list_adapters()] == [False, True]


def test_a_link_that_leads_nowhere(folder: Path, expected: Any, tmp_path: Path) -> None:
    """As in a cache of downloads that was cleaned: it is named, at the first load and later."""
    shutil.copytree(folder / "a", tmp_path / "a")
    (tmp_path / "a" / FILE).rename(tmp_path / "a" / "blob")
    (tmp_path / "a" / FILE).symlink_to("blob")
    with load(folder, max_loras=1, max_cpu_loras=1) as llm:
        llm.load_adapter("a", tmp_path / "a")
        llm.load_adapter("b", folder / "b")
        (tmp_path / "a" / "blob").unlink()
        base, broken, other = answers(llm, None, "a", "b")
        assert [base, other] == [expected(None), expected("b")]
        assert "is a link that leads nowhere" in broken
        with pytest.raises(WeightLoadError, match="is a link that leads nowhere"):
            llm.load_adapter("again", tmp_path / "a")


def test_requests_with_paths(folder: Path, expected: Any, tmp_path: Path) -> None:
    """All adapters of a call are loaded or none, once, and none in place of a prompt's own."""
    a, b = (LoRARequest(name, 1, str(folder / name)) for name in ("a", "b"))
    with load(folder) as llm:
        for wrong in (LoRARequest("c", 3, str(tmp_path)), LoRARequest("a", 1, str(folder / "b"))):
            with pytest.raises(ValueError, match=r"adapter_config|give it another name"):
                answers(llm, a, b, wrong)
            assert not llm.list_adapters()
            assert not llm.executor.worker._adapters
        prompts = [{"prompt_token_ids": PROMPT, "adapter": own} for own in ("a", None, "b")]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=[b, a, b])
        assert "asks for the adapter 'a', and lora_request for 'b'" in (outputs[0].error or "")
        tokens = [list(output.outputs[0].token_ids) for output in outputs[1:]]
        assert tokens == [expected("a"), expected("b")]


def test_threads_that_ask_for_a_new_one(folder: Path, expected: Any) -> None:
    """Two threads may bring the same adapter at the same time: one of them loads it."""
    found: list[Any] = []
    with load(folder) as llm:
        worker, right = llm.executor.worker, llm.executor.worker.load_adapter

        def slow(*given: Any) -> Any:
            time.sleep(0.2)  # the other thread has asked by then
            return right(*given)

        worker.load_adapter = slow

        def ask() -> None:
            try:
                found.append(answers(llm, LoRARequest("a", 1, str(folder / "a"))))
            except Exception as error:
                found.append(error)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert found == [[expected("a")]] * 2
        assert len(llm.list_adapters()) == 1

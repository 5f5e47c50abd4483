"""Other people's clients run unchanged: LiteLLM, langchain-openai, TRL, lm-eval and guidellm.

They want packages beside which this project's do not install, so they run in an interpreter of
their own: ``CLIENTS_PYTHON=/path/of/venv/bin/python pytest tests/server/test_clients.py``, after
``pip install litellm langchain-openai trl requests guidellm 'lm_eval[api]' accelerate peft`` there.
tests/test_examples.py runs this package there, too, which also wants ``triton pydantic typer``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_module import AsyncLLM

PYTHON = os.environ.get("CLIENTS_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="CLIENTS_PYTHON names no interpreter")
KEY, ADMIN, MODEL = "sk-one-of-two", "sk-admin", "tiny"


@pytest.fixture(scope="module")
def checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model with a token for the end, which lm-eval begins texts with."""
    path = tmp_path_factory.mktemp("clients") / "checkpoint"
    shutil.copytree(folder, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "~"}))
    return path


@pytest.fixture(scope="module")
def server(
    start: Callable[..., Any], engine: Callable[..., Any], checkpoint: Path
) -> Iterator[Any]:
    with start(AsyncLLM(engine(max_num_seqs=64), max_waiting=256)) as served:
        yield served


def run(*arguments: str, folder: Path, timeout: float = 300, **variables: str) -> str:
    """Run the other interpreter in a folder; return what it has written."""
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [PYTHON, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CALLS = """
import json, os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from langchain_openai import ChatOpenAI, OpenAI

url, key, model = URL, KEY, "tiny"
messages = [{"role": "user", "content": "hi"}]
common = {"api_key": key, "messages": messages, "max_tokens": 9, "temperature": 0}

def content(answer):
    return answer.choices[0].message.content

def joined(chunks):
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices)

chat = ChatOpenAI(model=model, base_url=url, api_key=key, max_tokens=9, temperature=0)
answers = {
    "litellm": content(litellm.completion(model=f"openai/{model}", api_base=url, **common)),
    "litellm, streamed": joined(
        litellm.completion(model=f"openai/{model}", api_base=url, stream=True, **common)
    ),
    "litellm, vLLM": content(
        litellm.completion(model=f"hosted_vllm/{model}", api_base=url, top_k=5, **common)
    ),
    "litellm, Messages": content(
        litellm.completion(model=f"anthropic/{model}", api_base=url.removesuffix("/v1"), **common)
    ),
    "langchain": chat.invoke("hi").content,
    "langchain, streamed": "".join(chunk.content for chunk in chat.stream("hi")),
    "langchain, batch": chat.batch(["hi", "other"])[0].content,
    "langchain, Responses": ChatOpenAI(
        model=model, base_url=url, api_key=key, max_tokens=9, temperature=0, use_responses_api=True
    ).invoke("hi").content[0]["text"],
}
print(json.dumps(answers))
"""


def test_conversations(server: Any, tmp_path: Path) -> None:
    """LiteLLM by three protocols and langchain have the text that OpenAI's client has."""
    answer = server.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=9, temperature=0
    )
    wanted = answer.choices[0].message.content
    calls = CALLS.replace("URL", repr(f"{server.url}/v1")).replace("KEY", repr(KEY))
    answers = json.loads(run("-c", calls, folder=tmp_path).splitlines()[-1])
    assert answers == dict.fromkeys(answers, wanted)
    assert len(answers) == 8


ROLLOUTS = """
import json
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=URL)
client.session.headers["Authorization"] = "Bearer " + ADMIN
greedy = {"temperature": 0.0, "max_tokens": 5, "logprobs": 2}
print(json.dumps({
    "texts": client.generate(["one", "two words"], n=2, **greedy),
    "tokens": client.generate([[5, 6, 7]], **greedy),
    "chats": client.chat([[{"role": "user", "content": "hi"}]], **greedy),
    "scores": client.get_sequence_logprobs([[5, 6, 7, 8], [9, 10, 11]], [2, 1], top_logprobs=3),
    "ranks": client.get_world_size(),
    "mode": client.get_server_info()["model_config"]["logprobs_mode"],
}))
client.reset_prefix_cache()
"""


def test_rollouts(
    start: Callable[..., Any], engine: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    """TRL's client for vLLM's server gets tokens and logprobs of transformers' greedy search.

    It wants vLLM itself for sending weights over NCCL, which no test does: names stand for it.
    """
    for path, text in {
        "vllm-0.25.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.0\n",
        "vllm-0.25.0.dist-info/top_level.txt": "vllm\n",
        "vllm/__init__.py": "LLM = RequestOutput = SamplingParams = None\n",
        "vllm/sampling_params.py": "StructuredOutputsParams = None\n",
        "vllm/utils/network_utils.py": "get_ip = None\n",
        "vllm/distributed/weight_transfer/nccl_engine.py": (
            "NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = None\n"
        ),
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    with start(AsyncLLM(engine()), keys=[]) as server:
        script = ROLLOUTS.replace("URL", repr(server.url)).replace("ADMIN", repr(ADMIN))
        found = json.loads(run("-c", script, folder=tmp_path).splitlines()[-1])
    assert (found["ranks"], found["mode"]) == (1, "raw_logprobs")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    for name, samples in (("texts", 2), ("tokens", 1), ("chats", 1)):
        got = found[name]
        for number, ids in enumerate(got["completion_ids"]):
            prompt = got["prompt_ids"][number // samples]
            ours = torch.tensor(got["logprobs"][number])
            best = logprobs([*prompt, *ids])[len(prompt) - 1 : -1].topk(2)
            assert ids == best.indices[:, 0].tolist()
            assert torch.allclose(ours[:, :2], best.values, atol=1e-5)
            assert [each[:2] for each in got["logprob_token_ids"][number]] == best.indices.tolist()
    assert found["tokens"]["prompt_ids"] == [[5, 6, 7]]
    for number, (ids, start_at) in enumerate((([5, 6, 7, 8], 2), ([9, 10, 11], 1))):
        best = logprobs(ids)[start_at - 1 : -1].topk(3)
        scores = torch.tensor(found["scores"]["logprobs"][number])
        assert torch.allclose(scores, best.values, atol=1e-5)
        assert found["scores"]["logprob_token_ids"][number] == best.indices.tolist()


def write_tasks(folder: Path) -> None:
    """Write a task with choices and one of whole texts, of drawn words."""
    draw = random.Random(1)
    words = [
        "the",
        "a",
        "cat",
        "dog",
        "runs",
        "sits",
        "on",
        "mat",
        "under",
        "tree",
        "blue",
        "red",
        "green",
        "house",
        "small",
        "sea",
    ]
    choices = [
        {
            "question": " ".join(draw.choices(words, k=8)),
            "choices": [" ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(4)],
            "gold": draw.randrange(4),
        }
        for _ in range(60)
    ]
    texts = [{"text": " ".join(draw.choices(words, k=30))} for _ in range(30)]
    tasks: dict[str, tuple[list[Any], dict[str, Any], list[str]]] = {
        "tiny_choices": (
            choices,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "gold",
            },
            ["acc", "acc_norm"],
        ),
        "tiny_texts": (
            texts,
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
            },
            ["bits_per_byte"],
        ),
    }
    for name, (rows, settings, metrics) in tasks.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "test_split": "test",
            "num_fewshot": 0,
            "metric_list": [{"metric": metric} for metric in metrics],
            **settings,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # YAML has all of JSON


def test_lm_eval(server: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Through ``local-completions``, lm-eval finds the accuracy of its ``hf`` model."""
    write_tasks(tmp_path)
    tokenizer = f"tokenizer={checkpoint},tokenizer_backend=huggingface,tokenized_requests=True"
    completions = f"{server.url}/v1/completions"
    models = {
        "local-completions": f"model={MODEL},base_url={completions},max_retries=1,{tokenizer}",
        "hf": f"pretrained={checkpoint},dtype=float32",
    }
    found = {}
    for model, arguments in models.items():
        out = tmp_path / model
        run(
            "-m", "lm_eval", "run", "--tasks", "tiny_choices,tiny_texts", "--include_path",
            str(tmp_path), "--model", model, "--model_args", arguments, "--output_path", str(out),
            folder=tmp_path, HF_DATASETS_CACHE=str(tmp_path / "cache"),
        )  # fmt: skip
        (file,) = out.rglob("*.json")
        found[model] = json.loads(file.read_text())["results"]
    ours, theirs = found["local-completions"], found["hf"]
    for metric in ("acc,none", "acc_norm,none", "acc_stderr,none"):
        assert ours["tiny_choices"][metric] == theirs["tiny_choices"][metric]
    assert ours["tiny_texts"]["bits_per_byte,none"] == pytest.approx(
        theirs["tiny_texts"]["bits_per_byte,none"], rel=1e-7
    )
    assert 0 < ours["tiny_choices"]["acc,none"] < 1


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_guidellm(server: Any, checkpoint: Path, tmp_path: Path, path: str) -> None:
    """All requests of a benchmark of eight streams end as they should."""
    backend = f"kind=openai_http,target={server.url},model={MODEL},api_key={KEY}"
    run(
        "-m", "guidellm", "run", "--backend", f"{backend},request_format=/v1/{path}",
        "--profile", "kind=concurrent,streams=8", "--constraint", "kind=max_requests,count=40",
        "--tokenizer", f"kind=hf_auto,model={checkpoint}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--disable-console-interactive", "--output", f"kind=json,path={tmp_path / 'out.json'}",
        folder=tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert made == {"successful": 40, "errored": 0, "incomplete": 0, "total": 40}

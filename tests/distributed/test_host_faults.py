"""Two hosts of which one fails: the other one ends, names it, and has put out no wrong token.

Faults, moments, hosts and layouts are drawn. With ``AT_LENGTH=1`` there are 100 draws, and a table
is printed; ``DRAWS=3,17`` runs these alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import LLM, SamplingParams

HERE = Path(__file__).parent
PIPELINE = runpy.run_path(str(HERE / "test_pipeline.py"))
write, MODELS = PIPELINE["write"], PIPELINE["MODELS"]
FAULTS = runpy.run_path(str(HERE / "host_faults.py"))
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))
MOMENTS = ("starting", "loading", "steps", "updates", "moves")
# Which moments a fault has: files are read at two of them, and a host comes late at the start only.
KINDS = {
    "kill": MOMENTS, "stop": MOMENTS, "^C": MOMENTS, "cut link": MOMENTS, "slow link": MOMENTS,
    "full disk": MOMENTS, "wrong file": ("loading", "updates"), "late": ("starting",),
}  # fmt: skip
PAIRS = [(fault, moment) for fault, moments in KINDS.items() for moment in moments]
# Ranks of a stage, stages, and whether experts are spread over ranks.
LAYOUTS = [(2, 1, False), (1, 2, False), (2, 1, True), (2, 2, False)]
FEW = [91]  # over IPv6; answers of a program have 8 tokens
WRONG = ("another entry of config.json", "another value", "a file cut short", "no file")
PLUGIN = {
    "slow_model.py": """
import os
import time
from pathlib import Path

from vllm_module.models.mixtral import MixtralForCausalLM


class SlowMixtralForCausalLM(MixtralForCausalLM):
    def load_weights(self, weights):
        if "MARKS" in os.environ:
            (Path(os.environ["MARKS"]) / f"loading {os.environ.get('RANK')}").touch()
            time.sleep(1)
        report = super().load_weights(weights)
        if "MARKS" in os.environ:
            time.sleep(1)
        return report
""",
    "slow_model-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: slow-model\nVersion: 1\n",
    "slow_model-1.dist-info/entry_points.txt": "[vllm_module.models]\n"
    "SlowMixtralForCausalLM = slow_model:SlowMixtralForCausalLM\n",
}


def drawn(seed: int) -> dict[str, Any]:
    """Return a draw: every pair of fault and moment comes in turn, the rest by the seed."""
    draw = random.Random(seed)
    order = random.Random(0).sample(PAIRS, k=len(PAIRS))
    fault, moment = order[seed % len(order)]
    ways = {"updates": ["serve", "program"], "moves": ["program"]}
    # What torchrun itself waits for, before it starts ranks, is not ours.
    ways["starting"] = ["generate", "serve"]
    way = draw.choice(ways.get(moment, ["generate", "serve", "program"]))
    tp, pp, experts = LAYOUTS[2] if moment == "moves" else draw.choice(LAYOUTS)
    which = "host"
    if moment != "starting" and fault in ("kill", "stop"):
        launchers = ["launcher"] if fault == "kill" and way != "program" else []
        which = draw.choice(["host", "host", "rank", *launchers])
    comes = fault == "late" and draw.random() < 0.5
    delay = draw.uniform(0, 4 if moment == "starting" else 2)
    timeout = 30.0
    wrong = WRONG[2:] if moment == "updates" else WRONG  # an update may have other values
    if fault == "late":
        delay, timeout = (4.0, 30.0) if comes else (14.0, 8.0)
    return {
        "seed": seed, "fault": fault, "moment": moment, "host": draw.randrange(2), "way": way,
        "tp": tp, "pp": pp, "experts": experts, "which": which, "delay": delay,
        "timeout": timeout, "step_timeout": 8.0, "wrong": draw.choice(wrong), "comes": comes,
        "ipv6": seed % 5 == 1,
    }  # fmt: skip


def generated(llm: LLM, most: int) -> list[int]:
    asked = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], asked, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def written(base: Path) -> None:
    """Write two checkpoints, what one rank generates from each, and the slow model."""
    for number, name in enumerate(("model", "other")):
        write(base / name, "mixtral", seed=3 + number, max_position_embeddings=4096)
        with LLM(
            str(base / name), device="cpu", dtype="float32", kv_cache_memory_bytes=4 << 20,
            skip_tokenizer_init=True,
        ) as llm:  # fmt: skip
            tokens = generated(llm, 8 if chosen() == FEW else FAULTS["TOKENS"])
        (base / f"{name}.json").write_text(json.dumps(tokens))
        path = base / name / "config.json"
        config = json.loads(path.read_text()) | {"architectures": ["SlowMixtralForCausalLM"]}
        path.write_text(json.dumps(config))
    for name, text in PLUGIN.items():
        (base / "plugin" / name).parent.mkdir(parents=True, exist_ok=True)
        (base / "plugin" / name).write_text(text)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    unshare = ["unshare", "--map-root-user", "--net", "--mount"]
    if not shutil.which("ip") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("unshare may not make network namespaces here, or there is no 'ip' (iproute2)")
    made: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "host faults", written)
    return made


def spoil(folder: Path, wrong: str) -> None:
    """Give a host another file than the others have."""
    path = folder / "model.safetensors"
    if wrong == "another entry of config.json":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    elif wrong == "another value":
        weights = load_file(path)
        weights["model.norm.weight"] = weights["model.norm.weight"] + 1
        save_file(weights, path)
    elif wrong == "a file cut short":
        os.truncate(path, path.stat().st_size - 100)
    else:
        path.unlink()


def perform(base: Path, directory: Path, draw: dict[str, Any]) -> dict[str, Any]:
    """Run a draw, and return what was found; remove the folder, which is large."""
    for host in range(2):
        for name in ("model", "other"):
            shutil.copytree(base / name, directory / str(host) / name)
    (directory / "plugin").symlink_to(base / "plugin")
    if draw["fault"] == "wrong file":
        name = "model" if draw["moment"] == "loading" else "other"
        spoil(directory / str(draw["host"]) / name, draw["wrong"])
    words = ["unshare", "--map-root-user", "--net", "--mount", sys.executable]
    words += [str(HERE / "host_faults.py"), str(directory), json.dumps(draw)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    if done.returncode == 77:
        pytest.skip(f"no two hosts with a link: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return found


def verdict(base: Path, draw: dict[str, Any], found: dict[str, Any]) -> str:
    """Return ``""``, or what is wrong with how the hosts have taken the fault."""
    if not found["came"]:
        return "the moment did not come"
    if not found["ended"]:
        return "hung"
    if any(found["left"].values()):
        return f"orphan: {found['left']}"
    right = {name: json.loads((base / f"{name}.json").read_text()) for name in ("model", "other")}
    answers = list(found["answers"])
    lines = found["out"][0].splitlines()
    if draw["way"] == "program":
        whole = [line for line in lines if line.startswith('{"weights"')]
        answers += [json.loads(line) for line in whole if line.endswith("}")]
    elif draw["way"] == "generate":
        ids = re.findall(r"(\d+)(?:,|$)", "".join(lines))
        answers += [{"weights": "model", "tokens": [int(each) for each in ids]}]
    for answer in answers:
        tokens = answer["tokens"]
        if tokens != right[answer["weights"]][: len(tokens)]:
            return f"wrong tokens of {answer['weights']}: {tokens[:12]}"
    if draw["fault"] in ("slow link", "full disk") or draw["comes"]:
        # A server goes on until it is interrupted; the other host may be quicker than its rank.
        ends = ([130, 0], [130, 1]) if draw["way"] == "serve" else ([0, 0],)
        if errors := [each["error"] for each in answers if "error" in each]:
            return f"a request failed: {errors}"  # a server finishes them before it ends
        if found["codes"] in ends and any(each["tokens"] for each in answers):
            return ""
        if draw["fault"] != "full disk":
            return f"ended with codes {found['codes']}"
    if draw["fault"] == "wrong file" and draw["moment"] == "updates":
        went_on = found["codes"][0] == (130 if draw["way"] == "serve" else 0)
        return "" if went_on else f"ended with codes {found['codes']}"
    if draw["fault"] == "^C" and draw["host"] == 0 and found["codes"][1] == 0:
        return ""  # the way to stop a server
    other = 1 - draw["host"]
    ended_itself = "No space left on device" in found["err"][draw["host"]]
    if draw["fault"] == "full disk" and ended_itself and draw["host"] == 0:
        return ""  # rank 0 has closed the engine for a reason that its host has told
    for host in (0, 1) if draw["fault"] == "cut link" else (other,):  # a link has two ends
        if found["codes"][host] == 0:
            return f"ended with codes {found['codes']}"
        if not names(draw, 1 - host, found["err"][host] + found["out"][host]):
            return f"not named: on host {host}"
    return ""


def names(draw: dict[str, Any], at: int, text: str) -> bool:
    """Return whether a message names a host, or one of its ranks."""
    per_host = draw["tp"] * draw["pp"] // 2
    text = re.sub(r"one of the ranks [\d, ]+", "", text)
    text = re.sub(r"host \d of 2 (asks|waits) .*", "", text)
    ranks = [at * per_host + each for each in range(per_host)]
    said = re.findall(r"rank (\d+)", text)
    by_host = re.search(rf"host {at} \(|host {at} (did|has)", text)
    by_address = at == 0 and ("10.99.0.1:29501" in text or "fd00::1:29501" in text)
    return bool(by_host or by_address or any(int(rank) in ranks for rank in said))


def message(text: str) -> str:
    """Return the last line of a host that is an error of ours."""
    ours = [line for line in text.splitlines() if re.search(r"error: |Error: ", line)]
    ours = [line for line in ours if "ChildFailed" not in line]
    return ours[-1][-200:] if ours else ""


def chosen() -> list[int]:
    if given := os.environ.get("DRAWS"):
        return [int(each) for each in given.split(",")]
    return list(range(100)) if os.environ.get("AT_LENGTH") else FEW


def test_drawn_faults(base: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    table: dict[tuple[str, str], Counter[str]] = {}
    wrong = []

    def one(seed: int) -> None:
        draw, directory = drawn(seed), tmp_path / str(seed)
        found = perform(base, directory, draw)
        said = verdict(base, draw, found)
        longest = max([0.0, *found["seconds"].values()])
        kind = said.partition(":")[0].partition(" with ")[0] or "right"
        table.setdefault((draw["fault"], draw["moment"]), Counter())[kind] += 1
        brief = {name: draw[name] for name in ("fault", "which", "moment", "host", "way")}
        place = f"tp {draw['tp']} pp {draw['pp']} {'experts' * draw['experts']}"
        line = f"{seed}: {said or 'right'} after {longest:.1f} s, {brief} {place}; codes "
        line += f"{found['codes']}: {message(found['err'][1 - draw['host']])}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        if said:
            wrong.append(f"{line}\n{found['codes']} {found['err']}")
        else:
            shutil.rmtree(directory)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, chosen()))
    for (fault, moment), counts in sorted(table.items()):
        sys.stdout.write(f"{fault:10} {moment:9} {dict(counts)}\n")
    assert not wrong, "\n".join(wrong)


@pytest.mark.at_length
@pytest.mark.parametrize("name", MODELS)
def test_two_hosts_give_the_tokens_of_one_rank(name: str, base: Path, tmp_path: Path) -> None:
    """Two stages of two ranks, with whole experts on each rank where there are any; no fault."""
    changed = {} if name == "mamba2" else {"max_position_embeddings": 4096}
    folder = write(tmp_path / "model", name, **MODELS[name] | changed)
    (tmp_path / "other").symlink_to(folder)
    (tmp_path / "plugin").symlink_to(base / "plugin")
    with PIPELINE["engine"](folder, kv_cache_memory_bytes=4 << 20) as llm:
        expected = generated(llm, FAULTS["TOKENS"])
    draw = drawn(0) | {
        "fault": "none", "moment": "steps", "way": "generate", "delay": 0.0, "ipv6": False,
        "tp": 2, "pp": 2, "experts": name in ("mixtral", "deepseek-v3", "qwen3-next"),
    }  # fmt: skip
    found = perform(tmp_path, tmp_path / "hosts", draw)
    assert found["codes"] == [0, 0], found["err"]
    printed = re.findall(r"(\d+)(?:,|$)", "".join(found["out"][0].splitlines()))
    assert [int(each) for each in printed] == expected

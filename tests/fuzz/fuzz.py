"""Fuzz the reading of checkpoints and requests, guided by coverage of the rooms that read them.

Run by ``make fuzz``: ``fuzz.py KIND SECONDS FOLDER [OPTION of libFuzzer...]`` with KIND one
of oracle.KINDS. Fuzzing starts from the corpus of that kind and the inputs in FOLDER/KIND, and
adds an input there when it reaches new code. An input that breaks something is written to
FOLDER/KIND-crash-... or a similar name: add it to the corpus under a name that describes it.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import atheris
import torch

HERE = Path(__file__).parent
with atheris.instrument_imports(include=["vllm_module.weights", "vllm_module.server"]):
    from vllm_module.weights.formats import FORMATS, imported

    for each in FORMATS.values():  # which are else imported when they are used, without coverage
        imported(each.opener)
    import vllm_module.server.app  # noqa: F401

    KINDS = runpy.run_path(str(HERE / "oracle.py"))["KINDS"]


def main() -> None:
    kind, seconds, out = sys.argv[1:4]
    found = Path(out, kind)
    found.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    check = KINDS[kind]
    mutations = runpy.run_path(str(HERE / "mutate.py"))
    is_json = kind in ("config", "layout", "manifest", "quant_state")
    mutate = mutations["mutate_json" if is_json else f"mutate_{kind}"]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))

    def one_input(data: bytes) -> None:
        check(folder, data)

    def custom_mutator(data: bytes, most: int, seed: int) -> bytes:
        try:
            return mutate(data, most, seed, atheris.Mutate)
        except UnicodeEncodeError:  # half of a surrogate pair, which json.dumps did not escape
            return atheris.Mutate(data, most)

    options = [
        f"-max_total_time={seconds}",
        "-max_len=2048",
        "-timeout=20",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={found}-",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    corpora = [*sys.argv[4:], str(found), str(HERE / "corpus" / kind)]
    atheris.Setup([sys.argv[0], *options, *corpora], one_input, custom_mutator=custom_mutator)
    atheris.Fuzz()


main()

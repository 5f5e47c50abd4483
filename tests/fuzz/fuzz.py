"""Fuzz the reading of checkpoints, guided by what of vllm_module.weights was reached.

Run by ``make fuzz``: ``fuzz.py KIND SECONDS FOLDER [OPTION of libFuzzer...]`` with KIND file,
folder or config. It begins with the corpus of that kind and what FOLDER/KIND has from before. What
reaches new places is added there, and what breaks goes to FOLDER/KIND-crash-... and the like: keep
that in the corpus, by a name that tells what it is.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import atheris
import torch

with atheris.instrument_imports(include=["vllm_module.weights"]):
    import vllm_module.weights  # noqa: F401

HERE = Path(__file__).parent


def main() -> None:
    kind, seconds, out = sys.argv[1:4]
    found = Path(out, kind)
    found.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    check = runpy.run_path(str(HERE / "oracle.py"))["KINDS"][kind]
    mutations = runpy.run_path(str(HERE / "mutate.py"))
    by_kind = {"file": "mutate_file", "folder": "mutate_folder", "config": "mutate_json"}
    mutate = mutations[by_kind[kind]]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))

    def one_input(data: bytes) -> None:
        check(folder, data)

    def custom_mutator(data: bytes, most: int, seed: int) -> bytes:
        try:
            return mutate(data, most, seed, atheris.Mutate)
        except UnicodeEncodeError:  # a lone surrogate that json.dumps was not to escape
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

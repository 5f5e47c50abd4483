"""``vllm-module digest``: a number for each tensor of a checkpoint that no layout changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_module.base.messages import printable
from vllm_module.cli.options import JsonOption, LoadFormat, WeightOptions
from vllm_module.cli.output import by_number, console, print_json, print_table, print_text, working
from vllm_module.cli.output import shape as shape_text


def digest(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="A folder in Hugging Face layout, a hub id, or one file of weights.",
            show_default=False,
        ),
    ],
    *,
    weights: WeightOptions,
    as_json: JsonOption = False,
) -> None:
    """Print a digest of each tensor.

    Another one is that of the whole checkpoint. Every byte is read.

    Equal tensors have equal digests, whatever files they are in and in which format. The dtype and
    the shape are part of a tensor's digest, and the name is part of that of all. A digest finds
    mistakes; it is no proof against somebody who makes tensors that have the same one.

    JSON keys: checkpoint; load_format (or null); digest (of all); tensors (name, dtype, shape,
    digest).
    """
    if weights.load_format is LoadFormat.dummy:
        raise typer.BadParameter("dummy weights are not stored", param_hint="--load-format")
    if weights.model_code is not None:
        from vllm_module.build.registry import load_model_code

        load_model_code(weights.model_code)
    from vllm_module.weights.digests import digest_of_all, digest_weight
    from vllm_module.weights.source import find_source, open_weights

    found = find_source(
        source,
        load_format=weights.load_format.value,
        download_dir=weights.download_dir,
        described=False,
    )
    path: Path = getattr(found, "path", found.folder)
    digests = {}
    with working("reading") as show, open_weights(found) as checkpoint:
        taken = checkpoint.load_format
        for name, weight in checkpoint.items():  # in the order of the files
            show(f"reading {printable(name)}")
            digests[name] = digest_weight(weight)
    names = sorted(digests, key=by_number)
    of_all = digest_of_all(digests.items())
    if as_json:
        print_json(
            {
                "checkpoint": str(path),
                "load_format": taken,
                "digest": of_all,
                "tensors": [
                    {
                        "name": name,
                        "dtype": str(digests[name].dtype).removeprefix("torch."),
                        "shape": list(digests[name].shape),
                        "digest": digests[name].hex,
                    }
                    for name in names
                ],
            }
        )
        return
    out = console()
    print_table(
        out,
        ("digest", "tensor", "shape", "dtype"),
        [
            (
                digests[name].hex,
                printable(name),
                shape_text(list(digests[name].shape)),
                str(digests[name].dtype).removeprefix("torch."),
            )
            for name in names
        ],
    )
    out.print()
    print_text(out, f"{of_all}  all tensors")

"""``vllm-module digest``: a number for each tensor of a checkpoint that no layout changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_module.base.messages import printable, printable_name
from vllm_module.cli.options import JsonOption, WeightOptions, check_file
from vllm_module.cli.output import (
    CommandError,
    by_number,
    console,
    print_json,
    print_table,
    print_text,
    working,
    writing,
)
from vllm_module.cli.output import shape as shape_text
from vllm_module.cli.stored_weights import StoredSource, find_weights
from vllm_module.core.report import fold


def digest(
    source: StoredSource,
    *,
    weights: WeightOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Also write the digests for loads to compare: digests.json beside the weights.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a digest of each tensor.

    Another one is that of the whole checkpoint. Every byte is read. Of a sharded state, the tensors
    of rank 0 are read.

    Equal tensors have equal digests, whatever files they are in and in which format. The dtype and
    the shape are part of a tensor's digest, and the name is part of that of all. A digest finds
    mistakes; it is no proof against somebody who makes tensors that have the same one.

    If there is a digests.json beside the weights, the exit code is 1 where it has other digests,
    except of a sharded state, which a load with --digests compares.

    JSON keys: checkpoint; load_format (or null); digest (of all); tensors (name, dtype, shape,
    digest); different (names that digests.json has another digest of, or null without one).
    """
    out = check_file(out, "--out")
    found, path = find_weights(source, weights)
    from vllm_module.weights.digests import (
        DIGESTS,
        digest_of_all,
        digest_weight,
        digests_file,
        stored_digests,
    )
    from vllm_module.weights.sharded_state import ShardedState
    from vllm_module.weights.source import open_weights

    digests = {}
    with working("reading") as show, open_weights(found) as checkpoint:
        taken, stored = checkpoint.load_format, None
        if not isinstance(checkpoint, ShardedState):
            if out is None or out.resolve() != (found.folder / DIGESTS).resolve():
                stored = stored_digests(found.folder)  # else they are to be replaced
        elif out is not None:
            raise CommandError(
                f"{printable(path)} is a sharded state, whose digests.json has a part for each "
                "rank, and only rank 0 is read here: vllm-module shard writes it"
            )
        for name, weight in checkpoint.items():  # in the order of the files
            show(f"reading {printable(name)}")
            digests[name] = digest_weight(weight)
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": str(digests[name].dtype).removeprefix("torch."),
            "shape": list(digests[name].shape),
            "digest": digests[name].hex,
        }
        for name in sorted(digests, key=by_number)
    ]
    by_name = {each["name"]: each["digest"] for each in tensors}
    if out is not None:
        with writing(out):
            out.write_text(json.dumps(digests_file([by_name]), indent=2) + "\n", encoding="utf-8")
    different = None
    if stored is not None:
        listed = by_name.keys() | stored[0].keys()
        different = sorted(n for n in listed if by_name.get(n) != stored[0].get(n))
    of_all = digest_of_all(digests.items())
    if as_json:
        print_json(
            {
                "checkpoint": str(path),
                "load_format": taken,
                "digest": of_all,
                "tensors": tensors,
                "different": different,
            }
        )
    else:
        screen = console()
        rows = [
            (each["digest"], printable(each["name"]), shape_text(each["shape"]), each["dtype"])
            for each in tensors
        ]
        print_table(screen, ("digest", "tensor", "shape", "dtype"), rows)
        screen.print()
        print_text(screen, f"{of_all}  all tensors")
    if different:
        raise CommandError(
            f"{printable(found.folder / DIGESTS)} has other digests of "
            f"{', '.join(map(printable_name, fold(different)))}: download the files again, or "
            "write digests.json again if the change was meant"
        )

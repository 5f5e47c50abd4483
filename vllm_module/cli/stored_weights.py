"""The weights of a checkpoint, for commands that need no model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from vllm_module.cli.choices import LoadFormat
from vllm_module.cli.options import EMPTY, WeightOptions

if TYPE_CHECKING:
    from vllm_module.weights.source import Source

StoredSource: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A folder in Hugging Face layout, a hub id, a URL, or one file of weights.",
        show_default=False,
    ),
]


def find_weights(source: str, weights: WeightOptions) -> tuple[Source, Path]:
    """Return the source of stored weights, and the path or URL that messages name.

    Raises a usage error for dummy weights, and for "". A download draws its own bars.
    """
    if not source:
        raise typer.BadParameter(EMPTY, param_hint="CKPT")
    if weights.load_format is LoadFormat.dummy:
        raise typer.BadParameter(
            "dummy weights are not stored: plan lists those of a model", param_hint="--load-format"
        )
    if weights.model_code is not None:
        from vllm_module.build.registry import load_model_code

        load_model_code(weights.model_code)
    from vllm_module.weights.source import find_source

    found = find_source(
        source,
        load_format=weights.load_format.value,
        download_dir=weights.download_dir,
        described=False,
    )
    return found, getattr(found, "path", found.folder)

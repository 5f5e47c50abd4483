"""The page of a plan: one HTML file that needs no network and no other file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from vllm_module.base.messages import printable_name
from vllm_module.cli.host_plan import HostPlan, host_columns
from vllm_module.cli.model_plan import ModelPlan
from vllm_module.cli.output import shape, size
from vllm_module.cli.pictures.layout_drawings import layout_drawings
from vllm_module.cli.pictures.tiles import KINDS, Tile, tiles_of
from vllm_module.cli.rank_plan import PAGE_SIZE, RankPlan
from vllm_module.cli.tensor_plan import tensor_rows
from vllm_module.errors import WeightLoadError

_NUMBERS = re.compile("[0-9]+")
MEMORY_LINES = (24, 80, 141)  # GB of common GPUs


def plan_page(plan: ModelPlan, hosts: Sequence[HostPlan] = ()) -> str:
    """Return the page of a plan, with what each of ``hosts`` reads, keeps and sends.

    The KV cache is drawn for one sequence of ``plan.tokens``; the page can change both numbers.
    """
    files = resources.files(__package__)
    script = "".join(
        files.joinpath(name).read_text(encoding="utf-8") for name in ("plan.js", "layout.js")
    )
    page = files.joinpath("plan.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    ranks, report = plan.ranks, plan.report
    tiles = tiles_of(ranks)
    needed = [rank.device_bytes + rank.kv_cache_bytes(plan.tokens) for rank in ranks]
    end = 1.04 * max(*needed, MEMORY_LINES[-1] * 1e9)  # of the scale of memory, in bytes
    positions = plan.source.config.max_model_len or 0
    layout = None  # of a sharded state, and of a checkpoint that is refused
    with suppress(WeightLoadError):
        layout = layout_drawings(ranks[0].load, plan.layout)
    header, reads = tensor_rows(ranks[0].plans, every=False)
    return environment.from_string(page).render(
        name=printable_name(plan.source.name.rpartition("/")[2]),
        folder=printable_name(plan.source.name),
        dtype=str(plan.source.dtype).removeprefix("torch."),
        sizes=_sizes(plan),
        ranks=ranks,
        nbytes=plan.nbytes,
        tokens=plan.tokens,
        end=end,
        lines=MEMORY_LINES,
        kinds=_kinds_used(tiles),
        by_kind=[_bytes_by_kind(each) for each in tiles],
        positions=positions,
        fits=[_fit(gigabytes, ranks, positions) for gigabytes in MEMORY_LINES],
        header=header,
        reads=reads,
        hosts=hosts,
        host_columns=host_columns([plan], hosts),
        problems="" if report.ok else str(report),
        skipped=report.skipped,
        size=size,
        has_layout=layout is not None,
        data=_data(ranks, tiles, end) | {"layout": layout},
        # With the script's digest in the page's policy, a browser runs no other script.
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        script=Markup(script),
    )


def _sizes(plan: ModelPlan) -> str:
    experts = f", expert-parallel size {plan.ep_size}" if plan.ep_size > 1 else ""
    return f"tensor-parallel size {plan.tp_size}{experts}"


def _bytes_by_kind(tiles: Sequence[Tile]) -> dict[str, int]:
    return {kind: sum(tile.bytes for tile in tiles if tile.kind == kind) for kind in KINDS}


def _kinds_used(tiles: Sequence[Sequence[Tile]]) -> dict[str, str]:
    used = {tile.kind for each in tiles for tile in each}
    labels = {kind: label for kind, label in KINDS.items() if kind in used}
    if len(tiles) == 1:  # nothing is cut
        labels |= {"cut": "whole"} if "cut" in used else {}
        labels |= {"cut8": "whole and quantized"} if "cut8" in used else {}
    return labels


def _fit(gigabytes: int, ranks: Sequence[RankPlan], positions: int) -> tuple[str, str]:
    """Say what remains of a GPU's memory beside the weights of the rank with the largest.

    A cache with room for more tokens than the ``positions`` of a sequence is for several.
    """
    fullest = max(ranks, key=lambda rank: rank.device_bytes)
    rest = int(gigabytes * 1e9) - fullest.device_bytes
    if rest < 0:
        return f"{gigabytes} GB", f"the weights of rank {fullest.rank} do not fit"
    tokens = fullest.kv_cache_tokens(int(gigabytes * 1e9)) if fullest.kv_page_bytes else 0
    cache = f": the KV cache of {tokens:,} tokens" if tokens else ""
    if tokens > positions > 0:
        cache += f", {tokens / positions:,.1f} sequences of {positions:,}"
    return f"{gigabytes} GB", f"{size(rest)} left{cache}"


def _data(ranks: Sequence[RankPlan], tiles: Sequence[Sequence[Tile]], end: float) -> dict[str, Any]:
    """Return what the page's script draws; what ranks have in common is there once.

    Ranks whose tiles differ in numbers of names only, such as the experts', share a list of tiles.
    """
    files: dict[str, int] = {}
    alike: dict[Any, list[int]] = {}  # ranks, by their tiles without the numbers in names
    for at, each in enumerate(tiles):
        key = tuple((*(_NUMBERS.sub("0", text) for text in tile[:4]), tile[4:]) for tile in each)
        alike.setdefault(key, []).append(at)
    described: dict[Any, int] = {}
    lists, numbers = [], dict[int, list[str]]()
    list_of = dict[int, int]()  # by rank
    for number, members in enumerate(alike.values()):
        varying: dict[tuple[str, ...], int] = {}
        texts = cache(partial(_with_numbers, varying))
        lists.append(
            [
                [
                    described.setdefault(_described(column, texts, files), len(described)),
                    *(column[0].byte_range or ()),
                ]
                for column in zip(*(tiles[at] for at in members), strict=True)
            ]
        )
        list_of |= dict.fromkeys(members, number)
        for i, at in enumerate(members):
            numbers[at] = [values[i] for values in varying]
    return {
        "tiles": list(described),
        "lists": lists,
        "files": [printable_name(file) for file in files],
        "end": end,
        "pageSize": PAGE_SIZE,
        "ranks": [
            {
                "rank": rank.rank,
                "bytes": rank.device_bytes,
                "pageBytes": rank.kv_page_bytes,
                "list": list_of[at],
                "numbers": numbers[at],
            }
            for at, rank in enumerate(ranks)
        ],
    }


def _described(
    column: Sequence[Tile], texts: Callable[[tuple[str, ...]], object], files: dict[str, int]
) -> tuple[Any, ...]:
    """Return what ranks that are alike say of one of their tiles."""
    tile = column[0]
    file = -1 if tile.file is None else files.setdefault(tile.file, len(files))
    named = ((each.layer, each.name, each.parameter, each.slot) for each in column)
    return (
        *map(texts, zip(*named, strict=True)),
        tile.kind,
        tile.bytes,
        shape(tile.shape),
        shape(tile.of),
        tile.stored,
        tile.held,
        tile.copies,
        tile.tensors,
        printable_name(tile.note),
        file,
        tile.pieces,
    )


def _with_numbers(varying: dict[tuple[str, ...], int], texts: tuple[str, ...]) -> object:
    """Return a text that all ranks share, or its parts: texts, and places in ``varying``."""
    first = texts[0]
    if len({*texts}) == 1:
        return printable_name(first)
    parts: list[str | int] = []
    begin = 0
    for found, *values in zip(
        _NUMBERS.finditer(first), *(_NUMBERS.findall(text) for text in texts), strict=True
    ):
        if len({*values}) > 1:
            number = varying.setdefault(tuple(values), len(varying))
            parts += [printable_name(first[begin : found.start()]), number]
            begin = found.end()
    return (*parts, printable_name(first[begin:]))

"""``plan --html``: what is in the page, and how a browser shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.cli.model_plan import ModelPlan
from vllm_module.cli.pictures.plan_page import plan_page
from vllm_module.cli.pictures.tiles import Tile, _merged, layer_of, tiles_of
from vllm_module.cli.rank_plan import PAGE_SIZE, RankPlan, plan_ranks
from vllm_module.weights.source import Folder

Run = Callable[..., Any]
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

# Shows a page in frames of two widths, chooses the last rank in the first one, and then writes what
# it sees into its own title.
HARNESS = """<!doctype html><title></title><script>
const seen = {};
for (const width of [390, 1280]) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.addEventListener("load", () => setTimeout(() => {
    const page = frame.contentDocument, view = frame.contentWindow;
    const figures = [...page.querySelectorAll("figure")].map(each => each.textContent);
    const boxes = [...page.querySelectorAll(".layouts rect")].filter(rect => rect.tile);
    const layouts = boxes.map(rect => {
      rect.dispatchEvent(new view.PointerEvent("pointerdown", { bubbles: true }));
      const [id] = rect.getAttribute("fill").match(/ranks-[0-9]+/) || [];
      const filled = id ? [...page.getElementById(id).children].slice(1) : [rect];
      return { name: rect.tile.drawing.slots[rect.tile.slot].names[0],
        tip: page.getElementById("tip").innerText, x: Number(rect.getAttribute("x")),
        colours: filled.map(each => view.getComputedStyle(each).fill) };
    });
    boxes[0].ownerSVGElement.dispatchEvent(new view.KeyboardEvent("keydown",
      { key: "ArrowRight", bubbles: true }));
    const keyed = page.querySelector("rect.chosen").tile.kind;
    const choice = page.querySelector(".layouts select");
    choice.selectedIndex = 1;
    choice.dispatchEvent(new view.Event("change"));
    boxes[0].dispatchEvent(new view.PointerEvent("pointerdown", { bubbles: true }));
    const second = page.querySelector("#tip strong").textContent;
    page.querySelector(".views button:last-child").click();
    const rects = [...page.querySelectorAll("svg rect")].filter(rect => rect.tile);
    rects[0].dispatchEvent(new view.PointerEvent("pointerdown", { bubbles: true }));
    seen[width] = { layouts, keyed, second, figures, title: page.title,
      scrollWidth: page.documentElement.scrollWidth,
      tiles: rects.length, tip: page.getElementById("tip").innerText,
      alone: page.querySelectorAll("figure").length };
    document.title = JSON.stringify(seen);
  }, 200));
  frame.srcdoc = PAGE;
  document.documentElement.append(frame);
}
</script>"""


def planned(folder: Path, tp_size: int, **entries: Any) -> list[RankPlan]:
    source = ModelSource.find(ModelConfig(model=str(folder), **entries))
    with source.open() as checkpoint:
        return plan_ranks(source, checkpoint, tp_size)


def page_of(ranks: list[RankPlan], folder: Path, shown: str) -> str:
    found = ModelSource.find(ModelConfig(model=str(folder)))
    source = replace(found, source=Folder(Path(shown)))
    return plan_page(ModelPlan(source, 1000, ranks, 64, torch.bfloat16, len(ranks), 1))


def data_of(page: str) -> Any:
    (text,) = re.findall(
        r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("quantization", [None, "fp8_per_channel"])
def test_tiles_add_up(folder: Path, tp_size: int, quantization: str | None) -> None:
    """The tiles of a rank have the bytes of its memory, and the kinds say how they are held."""
    ranks = planned(folder, tp_size, quantization=quantization)
    low = "8" if quantization else ""
    for rank, tiles in zip(ranks, tiles_of(ranks), strict=True):
        assert sum(tile.bytes for tile in tiles) == rank.device_bytes
        kinds = {tile.name: tile.kind for tile in tiles}
        layer = "model.layers.1.self_attn."
        assert kinds[f"{layer}q_proj.weight"] == f"cut{low}"
        # There are two heads of keys: with four ranks, two keep the same one.
        assert kinds[f"{layer}k_proj.weight"] == ("copy" if tp_size == 4 else "cut") + low
        assert kinds["model.norm.weight"] == ("cut" if tp_size == 1 else "copy")
        assert {tile.layer for tile in tiles if tile.slot} == {
            f"model.layers.{i}" for i in range(3)
        }
        made = [tile.name for tile in tiles if tile.note == "computed, not read"]
        assert any(name.endswith("_scale") for name in made) == bool(quantization)
        assert rank.kv_page_bytes == PAGE_SIZE * 3 * 2 * 8 * max(1, 2 // tp_size) * 2
    # The vocabulary of 130 has rows of zeros up to 192, which are all that the last of four keeps.
    padding = [tile for tiles in tiles_of(ranks) for tile in tiles if tile.note == "padding: zeros"]
    assert sum(tile.bytes for tile in padding) == 2 * (192 - 130) * 32 * 2


def test_tied_tensors_are_one_tile(edited: Callable[..., Path]) -> None:
    """A tied tensor counts once, and its tile names the other path."""

    def untie(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    ranks = planned(edited(untie, tie_word_embeddings=True), 2)
    for rank, tiles in zip(ranks, tiles_of(ranks), strict=True):
        assert sum(tile.bytes for tile in tiles) == rank.device_bytes
        assert [tile.note for tile in tiles if "tied" in tile.note] == ["tied: lm_head.weight"]


def test_experts_of_a_layer_share_a_tile(folder: Path) -> None:
    """Tensors that differ in a number below the layer's are one tile; layers stay apart."""
    (rank,) = planned(folder, 1)
    norm = next(plan for plan in rank.plans if plan.parameter == "model.norm.weight")
    names = [f"model.layers.{i}.experts.{j}.w" for i in range(2) for j in range(3)]
    plans = [norm._replace(name=name, parameter=name) for name in names]
    paths = {torch.empty(32, dtype=torch.bfloat16): [name] for name in names}
    (tiles,) = tiles_of([replace(rank, plans=plans, paths=paths)])
    assert [(tile.name, tile.tensors) for tile in tiles] == [
        ("model.layers.0.experts.{0..2}.w", 3),
        ("model.layers.1.experts.{0..2}.w", 3),
    ]
    assert tiles[0].bytes == 3 * 32 * 2
    fused = "model.layers.0.experts.w13.weight"  # as one parameter, in slots
    plans = [
        norm._replace(name=paths, parameter=fused, slot=f"{j}.up") for j, paths in enumerate(names)
    ]
    (tiles,) = tiles_of([replace(rank, plans=plans, paths={torch.empty(6 * 32): [fused]})])
    assert [(tile.slot, tile.tensors) for tile in tiles] == [("{0..5}.up", 6)]
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens"


OTHERS = {
    "layer": "model.layers.3", "slot": "up", "kind": "copy", "shape": (2, 5), "held": "float32",
    "note": "tied: x",
}  # fmt: skip
MAY_DIFFER = {"file": "b", "byte_range": (4, 8), "pieces": 2, "copies": 3, "stored": "float32"}


@pytest.mark.parametrize("field", [None, *OTHERS, *MAY_DIFFER])
@pytest.mark.parametrize("at", range(3))
def test_what_a_tile_shows_is_true_of_all_its_tensors(field: str | None, at: int) -> None:
    """One of three experts that differs in colour, size or dtype has a tile of its own."""
    given = [
        Tile(
            "model.layers.2", f"model.layers.2.experts.{number}.w", "w", "gate", "cut", 10 + number,
            (2, 4), (4, 4), "bfloat16", "bfloat16", 1, 1, "", "a", (0, 4), 1,
        )
        for number in range(3)
    ]  # fmt: skip
    if field is not None:
        given[at] = given[at]._replace(**{field: (OTHERS | MAY_DIFFER)[field]})
    found = list(_merged(given, ", ".join))
    apart = field in OTHERS
    assert sorted(tile.tensors for tile in found) == ([1, 2] if apart else [3])
    assert sum(tile.bytes for tile in found) == 33
    for tile in found:
        own = [each for each in given if each.name in tile.name.split(", ")]
        assert tile.tensors == len(own)
        assert tile.bytes == sum(each.bytes for each in own)
        for each in OTHERS.keys() - {"slot"}:  # which the tile lists
            assert {getattr(one, each) for one in own} == {getattr(tile, each)}
        files = {each.file for each in own}
        assert tile.file == (files.pop() if len(files) == 1 else None)
        assert tile.byte_range == (own[0].byte_range if len(own) == 1 else None)


def test_the_page_needs_nothing_else(run: Run, folder: Path, tmp_path: Path) -> None:
    """The page has no address but that of SVG, and the command prints its tables all the same."""
    path = tmp_path / "plan.html"
    result = run("plan", folder, "--tp", 2, "--html", path)
    assert result.code == 0
    assert "rank" in result.out
    page = path.read_text()
    addresses = re.findall(r"https?://[^\"' ]*|(?:src|href)=\"[^\"]*\"|url\([^)]*\)", page)
    assert set(addresses) == {
        "http://www.w3.org/2000/svg",
        'href="data:,"',
        "url(#stripes)",
        "url(#${id})",  # stripes of ranks' colours, which the script makes
    }
    data = data_of(page)
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    names = {tile[1] for tile in data["tiles"]}
    assert "model.layers.2.mlp.down_proj.weight" in names
    for memory in ("24 GB", "80 GB", "141 GB"):  # without JavaScript too
        assert f"<td>{memory}</td>" in page


def test_a_refused_checkpoint_has_a_page(
    run: Run, edited: Callable[..., Path], tmp_path: Path
) -> None:
    """The page lists the problems, whose names are text."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HOSTILE] = torch.zeros(1)

    path = tmp_path / "plan.html"
    assert run("plan", edited(damage), "--html", path).code == 1
    page = path.read_text()
    assert HOSTILE not in page
    assert html.escape(HOSTILE, quote=False).replace("'", "&#39;") in page
    assert "This checkpoint would be refused" in page


def hostile_page(folder: Path) -> str:
    """Return a page in which every text that comes from a checkpoint is hostile."""
    planned_ranks = planned(folder, 2)
    load = planned_ranks[0].load
    load = replace(load, fills=[fill._replace(name=f"{fill.name}{HOSTILE}") for fill in load.fills])
    ranks = [
        replace(
            rank,
            load=load,
            plans=[
                plan._replace(
                    name=f"{plan.name}{HOSTILE}", file=HOSTILE, slot=plan.slot and HOSTILE
                )
                for plan in rank.plans
            ],
        )
        for rank in planned_ranks
    ]
    return page_of(ranks, folder, HOSTILE.replace("/", "\u2215"))


def test_names_are_text(folder: Path) -> None:
    """No name of a tensor, slot, file or folder can end an element or start one."""
    page = hostile_page(folder)
    assert page.count("<script") == 2
    assert "<img" not in page
    assert any(HOSTILE in tile[1] for tile in data_of(page)["tiles"])


# Layout and scripts exist in a browser only; the tests above read the page as text everywhere.
@pytest.mark.skipif(not BROWSER, reason="needs chromium or chrome")
def test_in_a_browser(folder: Path, tmp_path: Path) -> None:
    """At 390 and 1280 pixels all ranks are there, nothing overflows and the console is empty."""
    page = json.dumps(hostile_page(folder)).replace("<", "\\u003c")
    (tmp_path / "harness.html").write_text(HARNESS.replace("PAGE", page))
    command = [
        BROWSER,
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--enable-logging=stderr", "--dump-dom"),
        *("--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}"),
        (tmp_path / "harness.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (title,) = re.findall("<title>(.*?)</title>", done.stdout)
    seen = json.loads(html.unescape(title))
    assert set(seen) == {"390", "1280"}
    for width, shown in seen.items():
        assert shown["scrollWidth"] == int(width)
        assert [figure.split(":")[0] for figure in shown["figures"]] == ["rank 0", "rank 1"]
        assert shown["alone"] == 1
        assert shown["tiles"] > 30
        assert HOSTILE in shown["tip"]
        assert "byte range" in shown["tip"]
        check_layouts(shown)
        assert shown["title"].startswith("<\u2215script>")  # and is not what the hostile name sets
    assert "CONSOLE" not in done.stderr


def check_layouts(shown: dict[str, Any]) -> None:
    """Check what the browser showed of the layout of two ranks: colours, order and texts."""
    first, other = "rgb(0, 114, 178)", "rgb(230, 159, 0)"
    layers = "model.layers.{0..2}.self_attn."
    colours: dict[str, list[list[str]]] = {}
    for box in shown["layouts"]:
        colours.setdefault(box["name"].removesuffix(HOSTILE), []).append(box["colours"])
        assert HOSTILE in box["tip"]
        assert "byte range" in box["tip"]
    for slot in "qkvo":
        assert colours[f"{layers}{slot}_proj.weight"] == [[first], [other]]
    assert colours["model.layers.{0..2}.self_attn.q_norm.weight"] == [[first, other]]
    (left, *_) = (box["x"] for box in shown["layouts"] if "q_proj" in box["name"])
    (right, *_) = (box["x"] for box in shown["layouts"] if "k_proj" in box["name"])
    assert left < right
    assert shown["keyed"] == "box"
    assert shown["second"] == f"lm_head.weight{HOSTILE}"


def test_a_cache_for_more_than_a_sequence_is_said_to_be_for_several(folder: Path) -> None:
    """A sequence has no more tokens than the model has positions; neither has the page's field."""
    ranks = planned(folder, 1)
    positions = ModelSource.find(ModelConfig(model=str(folder))).config.max_model_len
    assert positions is not None
    page = page_of(ranks, folder, "/model")
    tokens = ranks[0].kv_cache_tokens(24_000_000_000)
    assert tokens > positions
    assert f"of {tokens:,} tokens, {tokens / positions:,.1f} sequences of {positions:,}" in page
    (field,) = re.findall(r'<input id="context"[^>]*>', page)
    assert f'max="{positions}"' in field

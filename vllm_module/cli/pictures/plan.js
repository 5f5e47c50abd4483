"use strict";
// Draws the treemaps; layout.js, which the page has after it, draws layouts. Text of the checkpoint goes into the page as text only, never as markup.
document.body.classList.remove("without-script");
const plan = JSON.parse(document.getElementById("plan").textContent);
const FIELDS = ["layer", "name", "parameter", "slot", "kind", "bytes", "shape", "of", "stored", "held",
  "copies", "tensors", "note", "file", "pieces"];
const tiles = plan.tiles.map(row => Object.fromEntries(FIELDS.map((field, i) => [field, row[i]])));
const tip = document.getElementById("tip");
const maps = document.querySelector(".maps");
// Of a text that differs between ranks, the parts: numbers are places in a rank's own list.
const textOf = (parts, rank) => Array.isArray(parts)
  ? parts.map(part => typeof part === "number" ? rank.numbers[part] : part).join("") : parts;
let shown = null;  // the rank whose treemap fills the page; null: all ranks
let chosen = null;

function size(bytes) {
  if (bytes < 1000) return `${Math.round(bytes)} B`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    bytes /= 1000;
    if (bytes < 999.5 || unit === "TB") return `${Number(bytes.toPrecision(3))} ${unit}`;
  }
}

function svg(tag, attributes, parent) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}

// Squarified treemap (Bruls, Huizing, van Wijk 2000): rows whose tiles are as square as possible.
// Yields [item, x, y, width, height] for items with bytes, which fill the rectangle.
function* squarify(items, x, y, width, height) {
  const sorted = items.filter(item => item.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const unit = width * height / sorted.reduce((sum, item) => sum + item.bytes, 0);
  const worst = (row, sum, side) => {
    const thickness = sum * unit / side;
    const length = bytes => bytes * unit / thickness;
    return Math.max(length(row[0].bytes) / thickness, thickness / length(row[row.length - 1].bytes));
  };
  for (let next = 0; next < sorted.length;) {
    const side = Math.min(width, height);
    const row = [sorted[next++]];
    let sum = row[0].bytes;
    while (next < sorted.length) {
      const more = sum + sorted[next].bytes;
      if (worst([...row, sorted[next]], more, side) > worst(row, sum, side)) break;
      row.push(sorted[next++]);
      sum = more;
    }
    const thickness = sum * unit / side;
    let along = 0;
    for (const item of row) {
      const length = item.bytes * unit / thickness;
      yield width >= height
        ? [item, x, y + along, thickness, length]
        : [item, x + along, y, length, thickness];
      along += length;
    }
    if (width >= height) { x += thickness; width -= thickness; } else { y += thickness; height -= thickness; }
  }
}

function entered(id) {
  const input = document.getElementById(id);
  const number = Math.max(0, Math.floor(Number(input.value)) || 0);
  return input.max ? Math.min(number, Number(input.max)) : number;
}

function cacheBytes(rank) {
  return entered("sequences") * Math.ceil(entered("context") / plan.pageSize) * rank.pageBytes;
}

function label(parent, text, x, y, width, kind, em) {
  if (width < text.length * em * 0.58 + 6) return;
  svg("text", { x, y, class: kind }, parent).textContent = text;
}

function shortName(tile) {
  const parts = (tile.slot || tile.parameter).split(".");
  return tile.slot || parts[parts.length - 2] || parts[0];
}

function drawRank(rank, width, height, cache) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = `rank ${rank.rank}: ${size(rank.bytes)}` + (cache ? ` + ${size(cache)}` : "");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0,
    "aria-label": caption.textContent }, figure);
  figure.prepend(caption);
  const em = parseFloat(getComputedStyle(document.documentElement).fontSize) * 0.69;
  const left = width * rank.bytes / (rank.bytes + cache);

  const layers = new Map();
  for (const [index, begin, end] of plan.lists[rank.list]) {
    const tile = { ...tiles[index] };
    for (const field of FIELDS.slice(0, 4)) tile[field] = textOf(tile[field], rank);
    if (!layers.has(tile.layer)) layers.set(tile.layer, { name: tile.layer, bytes: 0, tiles: [] });
    const layer = layers.get(tile.layer);
    layer.bytes += tile.bytes;
    layer.tiles.push({ ...tile, begin, end });
  }
  const borders = [];
  for (const [layer, x, y, w, h] of squarify([...layers.values()], 0, 0, left, height)) {
    borders.push([layer, x, y, w, h]);
    for (const [tile, tx, ty, tw, th] of squarify(layer.tiles, x, y, w, h)) {
      const rect = svg("rect", { x: tx.toFixed(2), y: ty.toFixed(2), width: tw.toFixed(2),
        height: th.toFixed(2), class: tile.kind }, picture);
      rect.tile = tile;
      const first = tx === x && ty === y && w > 2.9 * em && h > 1.6 * em;  // has the layer's name
      if (th > (first ? 3 : 1.5) * em && layer.tiles.length > 1) {
        label(picture, shortName(tile), tx + 4, ty + th - 5, tw, `on-${tile.kind}`, em);
      }
    }
  }
  const fits = ([, , , w, h]) => h > 1.6 * em && w > 2.9 * em;
  const named = borders.filter(fits).length > borders.length / 2;  // not just a few of them
  for (const [layer, x, y, w, h] of borders) {
    svg("rect", { x: x.toFixed(2), y: y.toFixed(2), width: w.toFixed(2), height: h.toFixed(2),
      class: "layer" }, picture);
    const number = layer.name.match(/[0-9]+$/);
    const first = layer.tiles.reduce((a, b) => b.bytes > a.bytes ? b : a);
    if (named && fits([layer, x, y, w, h])) {
      label(picture, number ? number[0] : layer.name.split(".").pop(), x + 4, y + em + 2, w,
        `layer-name on-${first.kind}`, em);
    }
  }
  if (cache) {
    const rect = svg("rect", { x: left.toFixed(2), y: 0, width: (width - left).toFixed(2), height,
      class: "kv" }, picture);
    rect.tile = { kind: "kv", bytes: cache };
    label(picture, "KV cache", left + 6, em + 6, width - left, "layer-name", em);
  }
  return figure;
}

function draw() {
  hide();
  const ranks = shown === null ? plan.ranks : [plan.ranks[shown]];
  const room = maps.clientWidth;
  const columns = shown !== null ? 1
    : Math.min(ranks.length, room < 480 ? 2 : ranks.length <= 4 ? ranks.length : Math.ceil(room / 320));
  maps.style.setProperty("--columns", columns);
  const gap = parseFloat(getComputedStyle(maps).columnGap) || 0;
  const width = (room - gap * (columns - 1)) / columns;
  const totals = plan.ranks.map(rank => rank.bytes + cacheBytes(rank));
  const full = Math.min(width * (room < 480 ? 1.2 : 0.8), shown === null ? 480 : 640);
  maps.replaceChildren(...ranks.map(rank => {
    const cache = cacheBytes(rank);
    const height = full * (rank.bytes + cache) / Math.max(...totals, 1);
    return drawRank(rank, width, Math.max(height, 1), cache);
  }));
}

function update() {
  for (const rank of plan.ranks) {
    const cache = cacheBytes(rank);
    document.querySelector(`[data-cache="${rank.rank}"]`).style.width = `${100 * cache / plan.end}%`;
    document.querySelector(`[data-total="${rank.rank}"]`).textContent = size(rank.bytes + cache);
  }
  draw();
}

function details(tile) {
  if (tile.kind === "box") return boxDetails(tile);
  if (tile.kind === "kv") {
    return ["KV cache", { memory: size(tile.bytes),
      tokens: `${entered("sequences")} x ${entered("context").toLocaleString("en")}` }];
  }
  const rows = { parameter: tile.parameter + (tile.slot ? `, slot ${tile.slot}` : "") };
  rows.memory = `${size(tile.bytes)} (${tile.bytes.toLocaleString("en")} bytes), ${tile.held}`;
  rows.shape = tile.shape === tile.of ? tile.shape : `${tile.shape} of ${tile.of}`;
  if (tile.tensors > 1) rows.tensors = `${tile.tensors}, each of this shape`;
  if (tile.stored && tile.stored !== tile.held) rows["in the file"] = tile.stored;
  if (tile.kind.startsWith("copy")) rows.replicated = `on ${tile.copies} of ${plan.ranks.length} ranks`;
  if (tile.file >= 0) rows.file = plan.files[tile.file];
  if (tile.begin !== undefined) {
    rows["byte range"] = `${tile.begin.toLocaleString("en")} to ${tile.end.toLocaleString("en")}`
      + (tile.pieces > 1 ? `, ${tile.pieces.toLocaleString("en")} pieces` : "");
  }
  if (tile.note) rows.note = tile.note;
  return [tile.name, rows];
}

function show(rect, x, y) {
  if (chosen !== rect) {
    hide();
    chosen = rect;
    rect.classList.add("chosen");
    const [title, rows] = details(rect.tile);
    const heading = document.createElement("strong");
    heading.textContent = title;
    const list = document.createElement("dl");
    for (const [name, value] of Object.entries(rows)) {
      list.append(Object.assign(document.createElement("dt"), { textContent: name }),
        Object.assign(document.createElement("dd"), { textContent: value }));
    }
    tip.replaceChildren(heading, list);
    tip.style.display = "block";
  }
  const docked = innerWidth < 640;  // no room beside a finger
  tip.classList.toggle("docked", docked);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = docked ? "" : `${Math.min(x + 14, innerWidth - width - 8)}px`;
  tip.style.top = docked ? "" : `${y + 18 + height < innerHeight ? y + 18 : Math.max(8, y - height - 12)}px`;
}

function hide() {
  tip.style.display = "none";
  if (chosen) chosen.classList.remove("chosen");
  chosen = null;
}

for (const pictures of document.querySelectorAll(".maps, .layouts")) {
  pictures.addEventListener("pointermove", event => event.target.tile && show(event.target, event.clientX, event.clientY));
  pictures.addEventListener("pointerleave", event => event.pointerType === "mouse" && hide());
}
document.addEventListener("pointerdown", event => event.target.tile
  ? show(event.target, event.clientX, event.clientY) : hide());
document.addEventListener("keydown", event => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const picture = event.target.closest && event.target.closest("svg");
  if (event.key === "Escape") hide();
  if (!picture || !step) return;
  event.preventDefault();
  const rects = [...picture.querySelectorAll("rect")].filter(rect => rect.tile);
  const at = rects.indexOf(chosen);
  const rect = rects[at < 0 ? 0 : (at + step + rects.length) % rects.length];
  const box = rect.getBoundingClientRect();
  show(rect, box.right, box.bottom);
});

const views = document.querySelector(".views");
if (plan.ranks.length === 1) views.remove();
for (const view of plan.ranks.length > 1 ? [null, ...plan.ranks.keys()] : []) {
  const button = document.createElement("button");
  button.textContent = view === null ? "all ranks" : `rank ${plan.ranks[view].rank}`;
  button.setAttribute("aria-pressed", view === shown);
  button.addEventListener("click", () => {
    shown = view;
    for (const each of views.children) each.setAttribute("aria-pressed", each === button);
    draw();
  });
  views.append(button);
}
const stripes = svg("svg", { width: 0, height: 0, "aria-hidden": "true", style: "position:absolute" }, document.body);
const pattern = svg("pattern", { id: "stripes", width: 9, height: 9, patternUnits: "userSpaceOnUse",
  patternTransform: "rotate(45)" }, stripes);
svg("rect", { width: 9, height: 9, style: "fill:var(--kv);stroke:none" }, pattern);
svg("rect", { width: 2.5, height: 9, style: "fill:rgb(255 255 255 / 45%);stroke:none" }, pattern);
for (const id of ["context", "sequences"]) document.getElementById(id).addEventListener("input", update);
let width = 0;
new ResizeObserver(() => {
  if (maps.clientWidth === width) return;
  width = maps.clientWidth;
  requestAnimationFrame(draw);  // not here: it changes the size that is being observed
}).observe(maps);

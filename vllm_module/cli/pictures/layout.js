// Draws the layout: how each tensor is divided among ranks. It stands after plan.js in one script.
const layout = plan.layout;
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#9aa1a8"];
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];  // viridis
const MOST_STRIPES = 8;
const GAP = 16;

// Up to eight ranks have Okabe and Ito's colours, more have a ramp that also gets lighter.
function rankColour(rank) {
  if (layout.numRanks <= PALETTE.length) return PALETTE[rank];
  const at = rank / (layout.numRanks - 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const mixed = RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (at - low)));
  return `#${mixed.map(value => value.toString(16).padStart(2, "0")).join("")}`;
}

function isDark(colour) {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b < 130;
}

// Writes numbers as 0..3, 8.
function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === number - 1) last[1] = number; else found.push([number, number]);
  }
  const shown = found.slice(0, 8).map(([a, b]) => a === b ? `${a}` : `${a}..${b}`).join(", ");
  return found.length > 8 ? `${shown}, and others` : shown;
}

// The fill of boxes that these ranks hold: a colour, or stripes of their colours.
const fills = new Map();
function fillOf(ranks) {
  const key = ranks.join();
  if (!fills.has(key)) fills.set(key, ranks.length === 1 ? rankColour(ranks[0]) : stripesOf(ranks));
  return fills.get(key);
}

function stripesOf(ranks) {
  const number = Math.min(ranks.length, MOST_STRIPES);
  const id = `ranks-${fills.size}`;
  const [wide, apart] = [4, 6.5];
  const pattern = svg("pattern", { id, width: number * apart, height: 8, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" }, stripes);
  svg("rect", { width: number * apart, height: 8, style: "fill:var(--card);stroke:none" }, pattern);
  for (let i = 0; i < number; i++) {
    const rank = ranks[number > 1 ? Math.round(i * (ranks.length - 1) / (number - 1)) : 0];
    svg("rect", { x: i * apart, width: wide, height: 8, style: `fill:${rankColour(rank)};stroke:none` }, pattern);
  }
  return `url(#${id})`;
}

function ranksOf(box) {
  const all = new Set(box.holders.flatMap(([list]) => layout.rankLists[list]));
  return [...all].sort((a, b) => a - b);
}

const list = numbers => `[${numbers.map(n => n.toLocaleString("en")).join(", ")}]`;

function heldAt([, offset, shape, strides, step, packed], expert) {
  const at = (offset + expert * step).toLocaleString("en");
  return `offset ${at}, shape ${list(shape)}, strides ${list(strides)}`
    + (packed > 1 ? `, in values, ${packed} of which are packed in an element` : "");
}

function boxDetails({ drawing, slot, box, expert, picture }) {
  const [parameter, stored] = drawing.members[picture.member];
  const [named, file, begin, places] = stored[slot];
  const template = named ?? parameter;
  const about = drawing.slots[slot];
  const name = expert === null ? template : template.replace("{expert}", expert);
  const ranks = ranksOf(box);
  const rows = {};
  if (drawing.members.length > 1) rows["stands for"] = about.names.join(", ");
  rows.box = `start ${list(box.start)}, size ${list(box.size)} of ${list(about.shape)} in ${about.dtype}`
    + (box.view ? `, viewed as ${list(box.view)}` : "");
  rows[ranks.length > 1 ? "ranks" : "rank"] = spans(ranks);
  rows.parameter = `${parameter}${about.slot ? `, slot ${about.slot}` : ""} in ${drawing.dtype}`
    + (about.tied ? ": tied, another tensor fills it as well" : "");
  if (about.absent) rows["in the checkpoint"] = "absent: the layer fills it by itself";
  const number = box.experts && expert !== null ? expert - box.experts[0] : 0;
  for (const holder of box.holders.slice(0, 4)) {
    const which = box.holders.length > 1 ? `held by ${spans(layout.rankLists[holder[0]])}` : "held at";
    rows[which] = heldAt(holder, number);
    for (const [attr, ...held] of holder[6]) rows[`makes ${attr}`] = heldAt([0, ...held], number);
  }
  const conversion = layout.sheets[about.sheet].conversion;
  if (conversion) rows.conversion = conversion === "exponents" ? "exponents of two, plus 127" : conversion;
  if (file !== undefined) {
    const each = about.experts && expert !== null ? 2 * (expert - about.experts[0]) : -1;
    const [files, bytes] = each < 0 ? [0, 0] : layout.expertPlaces[places].slice(each, each + 2);
    const [first, last, runs] = box.span;
    const from = begin + bytes + first * about.itemsize, to = begin + bytes + last * about.itemsize;
    rows.file = layout.files[file + files];
    rows["byte range"] = `${from.toLocaleString("en")} to ${to.toLocaleString("en")}`
      + (runs > 1 ? `, ${runs.toLocaleString("en")} pieces` : "");
  }
  return [name, rows];
}

// Draws the boxes of a tensor into a rectangle of the picture.
function drawTensor(parent, sheet, boxes, x, y, width, height, about, em) {
  svg("rect", { x, y, width, height, class: "tensor" }, parent);
  for (const box of boxes) {
    const ranks = ranksOf(box);
    const fill = fillOf(ranks);
    for (const [row, column, rows, columns] of box.rectangles) {
      const [left, top] = [x + width * column / sheet.columns, y + height * row / sheet.rows];
      const [w, h] = [width * columns / sheet.columns, height * rows / sheet.rows];
      const rect = svg("rect", { x: left.toFixed(2), y: top.toFixed(2), width: Math.max(w, 0.3).toFixed(2),
        height: Math.max(h, 0.3).toFixed(2), fill, class: Math.min(w, h) < 3 ? "thin" : "" }, parent);
      rect.tile = { kind: "box", box, ...about };
      if (h < 1.2 * em) continue;
      const kind = ranks.length > 1 ? "on-stripes" : isDark(rankColour(ranks[0])) ? "on-cut" : "";
      label(parent, spans(ranks), left + 4, top + Math.min(h / 2 + 0.35 * em, 2 * em), w, kind, em);
    }
  }
}

// Whether ranks hold different experts. Otherwise each expert is divided alike, and one is drawn.
function isSpread(slot) {
  if (!slot.experts) return false;
  const [first, count] = slot.experts;
  return layout.sheets[slot.sheet].boxes.some(({ experts }) => experts
    && (experts[0] > first || experts[0] + experts[1] < first + count));
}

// Draws a cell for each expert; returns its height, which is all that is wanted without a parent.
function drawExperts(parent, about, slot, x, y, width, em) {
  const [first, count] = slot.experts;
  const sheet = layout.sheets[slot.sheet];
  const digits = `${layout.numRanks - 1}`.length;
  const columns = Math.max(1, Math.min(count, Math.floor(width / Math.max(20, digits * em * 0.58 + 8))));
  const side = Math.min(width / columns, 30);
  for (let at = 0; parent && at < count; at++) {
    const expert = first + at;
    const boxes = sheet.boxes.filter(({ experts }) => experts && experts[0] <= expert && expert < experts[0] + experts[1]);
    drawTensor(parent, sheet, boxes, x + at % columns * side, y + Math.floor(at / columns) * side, side - 1.5, side - 1.5,
      { ...about, expert }, em);
  }
  return Math.ceil(count / columns) * side;
}

function drawPicture(picture, drawing) {
  const em = parseFloat(getComputedStyle(document.documentElement).fontSize) * 0.69;
  const room = picture.clientWidth;
  const slots = drawing.slots;
  const sheets = slots.map(slot => layout.sheets[slot.sheet]);
  const widest = Math.max(...sheets.map(sheet => sheet.columns));
  const longest = Math.max(...sheets.map(sheet => sheet.rows));
  const width = (room - GAP * (slots.length - 1)) / slots.length;
  const full = Math.min(Math.max(width * longest / widest, 90), 190);
  const sizes = slots.map((slot, i) => {
    if (isSpread(slot)) return [width, drawExperts(null, {}, slot, 0, 0, width, em)];
    const across = Math.max(width * sheets[i].columns / widest, Math.min(width, 40));
    return [across, sheets[i].rows === 1 ? 24 : Math.max(full * sheets[i].rows / longest, 64)];
  });
  const titles = slots.map(slot => {
    const experts = slot.experts && `${isSpread(slot) ? "" : "each of "}${slot.experts[1]} experts`;
    return [slot.slot, experts, slot.tied && "tied"].filter(Boolean).join(", ");
  });
  const top = (titles.some(Boolean) ? 2.9 : 1.6) * em;
  const height = top + Math.max(...sizes.map(([, h]) => h)) + 2;
  picture.querySelectorAll("svg").forEach(old => old.remove());
  const names = drawing.names.join(", ");
  const shown = svg("svg", { viewBox: `0 0 ${room} ${height}`, height, role: "img", tabindex: 0,
    "aria-label": `${names}, ${slots.map(slot => `${slot.slot} ${list(slot.shape)}`).join(", ")}` }, picture);
  slots.forEach((slot, i) => {
    const x = i * (width + GAP);
    const spread = isSpread(slot);
    label(shown, titles[i], x, em, width + GAP, "of-tensor", em);
    const partly = sheets[i].drawn < 1 ? `, ${(100 * sheets[i].drawn).toPrecision(2)}% of the stripes` : "";
    label(shown, `${list(slot.shape)}${partly}`, x, titles[i] ? 2.3 * em : em, width + GAP, "shape", em);
    const about = { drawing, slot: i, picture, expert: null };
    if (spread) drawExperts(shown, about, slot, x, top, width, em);
    else drawTensor(shown, sheets[i], sheets[i].boxes, x, top, ...sizes[i], about, em);
  });
}

function drawLayout() {
  const colours = document.getElementById("rank-colours");
  const swatch = (ranks, text) => {
    const item = document.createElement("li");
    const picture = svg("svg", { class: "swatch", "aria-hidden": "true" }, item);
    svg("rect", { width: "100%", height: "100%", style: `fill:${fillOf(ranks)};stroke:none` }, picture);
    item.append(text);
    colours.append(item);
  };
  const every = [...Array(layout.numRanks).keys()];
  if (layout.numRanks <= PALETTE.length) {
    for (const rank of every) swatch([rank], `rank ${rank}`);
  } else {
    for (const rank of [0, 1, 2, 3, 4].map(i => Math.round(i * (layout.numRanks - 1) / 4))) swatch([rank], `rank ${rank}`);
  }
  if (layout.numRanks > 1) swatch(every, "all ranks");
  const pictures = document.querySelector(".layouts");
  const made = layout.drawings.map(drawing => {
    const picture = document.createElement("div");
    picture.member = 0;
    if (drawing.slots.some(isSpread)) picture.className = "wide-picture";
    const heading = document.createElement("h3");
    heading.textContent = drawing.names.join(", ");
    picture.append(heading);
    if (drawing.members.length > 1) {
      const choice = document.createElement("select");
      choice.setAttribute("aria-label", "Parameter whose places are shown");
      drawing.members.forEach(([path], i) => choice.append(new Option(path, i)));
      choice.addEventListener("change", () => { hide(); picture.member = Number(choice.value); });
      picture.append(choice);
    }
    pictures.append(picture);
    return [picture, drawing];
  });
  let before = 0;
  new ResizeObserver(() => {
    if (pictures.clientWidth === before) return;
    before = pictures.clientWidth;
    requestAnimationFrame(() => made.forEach(([picture, drawing]) => drawPicture(picture, drawing)));
  }).observe(pictures);
}

if (layout) drawLayout();

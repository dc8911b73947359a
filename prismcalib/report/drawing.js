/* Draws the timeline. Two canvases share the time axis: #map shows all ranks as shares of time per
 * cell, #lanes some ranks span by span.
 */
"use strict";

// ---- state --------------------------------------------------------------------------------

let block, spans, lanes, path, colours, pictures;
const view = { t0: 0, t1: info.window, l0: 0, l1: lineCount };
let selected = null; // { lane, span } chosen by keyboard
const map = byId("map"), laneCanvas = byId("lanes");
const tip = byId("tip"), spoken = byId("spoken");

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["compute", "inner_idle", "transfer", "wait", "gap", "ink", "surface", "muted", "rule"];
  colours = Object.fromEntries(names.map((name) => {
    const text = style.getPropertyValue(`--${name.replace("_", "-")}`).trim();
    const value = parseInt(text.slice(1), 16);
    return [name, { text, rgb: [value >> 16, (value >> 8) & 255, value & 255] }];
  }));
}

/** Every grid as a picture of one pixel a cell. */
function paintGrids() {
  pictures = info.grids.map((grid, number) => {
    const shares = bytesOf(`grid${number}`);
    const cells = grid.lines * grid.bins;
    const image = new ImageData(grid.bins, grid.lines);
    const gap = colours.gap.rgb;
    for (let cell = 0; cell < cells; cell++) {
      let rest = LEVELS, red = 0, green = 0, blue = 0;
      for (let part = 0; part < info.parts.length; part++) {
        const share = shares[part * cells + cell];
        if (!share) continue;
        const rgb = colours[info.parts[part]].rgb;
        rest -= share;
        red += share * rgb[0];
        green += share * rgb[1];
        blue += share * rgb[2];
      }
      rest = Math.max(rest, 0);
      image.data.set([(red + rest * gap[0]) / LEVELS, (green + rest * gap[1]) / LEVELS,
        (blue + rest * gap[2]) / LEVELS, 255], cell * 4);
    }
    const canvas = new OffscreenCanvas(grid.bins, grid.lines);
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  });
}

// ---- drawing ------------------------------------------------------------------------------

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return { pen, width, height };
}

const xOf = (t, width) => LEFT + ((t - view.t0) / (view.t1 - view.t0)) * (width - LEFT);
const tOf = (x, width) => view.t0 + ((x - LEFT) / (width - LEFT)) * (view.t1 - view.t0);
const yOf = (line, height) => TOP + ((line - view.l0) / (view.l1 - view.l0)) * (height - TOP);
const lineOf = (y, height) => view.l0 + ((y - TOP) / (height - TOP)) * (view.l1 - view.l0);

function niceStep(span, most) {
  const raw = span / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw);
}

function drawAxis(pen, width, height) {
  const step = Math.max(niceStep(view.t1 - view.t0, Math.max((width - LEFT) / 110, 2)), 1);
  const unit = step >= 1e9 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : step >= 100 ? [1e3, "µs"] : [1, "ns"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / unit[0]) - 1e-9));
  pen.textAlign = "center";
  for (let t = Math.ceil(view.t0 / step) * step; t <= view.t1; t += step) {
    const x = xOf(t, width);
    pen.fillStyle = colours.rule.text;
    pen.fillRect(x, TOP - 5, 1, 5);
    pen.fillStyle = colours.muted.text;
    const text = `${(t / unit[0]).toFixed(digits)} ${unit[1]}`;
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(x, LEFT + half), width - half), 9);
  }
  for (const [, end] of info.steps.slice(0, -1)) {
    if (end < view.t0 || end > view.t1) continue;
    pen.fillStyle = colours.ink.text;
    for (let y = TOP; y < height; y += 6) pen.fillRect(xOf(end, width), y, 1, 3);
  }
}

function drawPath(pen, width, y) {
  const last = firstAbove(path.start, view.t1);
  let first = Math.max(firstAbove(path.start, view.t0) - 2, 0);
  for (const [stroke, line] of [[colours.surface.text, 4], [colours.ink.text, 1.75]]) {
    pen.strokeStyle = stroke;
    pen.lineWidth = line;
    pen.lineJoin = "round";
    pen.beginPath();
    let before = null;
    for (let i = first; i < last; i++) {
      const height = y(path.line[i]);
      if (height === null) { before = null; continue; }
      const left = xOf(path.start[i], width), right = xOf(path.start[i] + path.length[i], width);
      if (before === null) pen.moveTo(left, height);
      else { // the path stays where it was until the next stretch begins
        pen.lineTo(left, before);
        pen.lineTo(left, height);
      }
      pen.lineTo(right, height);
      before = height;
    }
    pen.stroke();
  }
}

function clipToPlot(pen, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, TOP, width - LEFT, height - TOP);
  pen.clip();
}

/** The grid whose cells are the least coarse on the screen. */
function bestGrid(width, height) {
  let best = 0, least = Infinity;
  info.grids.forEach((grid, number) => {
    const wide = ((width - LEFT) * info.window) / grid.bins / (view.t1 - view.t0);
    const high = ((height - TOP) * grid.ranksPerLine) / (view.l1 - view.l0);
    const coarse = Math.max(Math.log2(wide), 0) + Math.max(grid.ranksPerLine > 1 ? Math.log2(high) : 0, 0);
    if (coarse < least) { least = coarse; best = number; }
  });
  return best;
}

function drawMap() {
  if (map.hidden) return;
  const { pen, width, height } = prepare(map);
  const number = bestGrid(width, height), grid = info.grids[number];
  const perNs = grid.bins / info.window;
  const source = [view.t0 * perNs, view.l0 / grid.ranksPerLine,
    (view.t1 - view.t0) * perNs, (view.l1 - view.l0) / grid.ranksPerLine];
  pen.imageSmoothingEnabled = source[2] > width - LEFT || source[3] > height - TOP;
  pen.imageSmoothingQuality = "high";
  clipToPlot(pen, width, height);
  pen.drawImage(pictures[number], ...source, LEFT, TOP, width - LEFT, height - TOP);
  if (byId("show-path").checked) drawPath(pen, width, (line) => yOf(line + 0.5, height));
  pen.restore();
  drawAxis(pen, width, height);
  drawRankLabels(pen, width, height);
}

function drawRankLabels(pen, width, height) {
  pen.textAlign = "right";
  const step = Math.max(1, niceStep(view.l1 - view.l0, (height - TOP) / 22));
  pen.fillStyle = colours.muted.text;
  for (let line = Math.ceil(view.l0 / step) * step; line < view.l1; line += step) {
    const y = yOf(line + 0.5, height);
    if (y > TOP + 5 && y < height - 4) pen.fillText(info.ranks[line], LEFT - 6, y);
  }
  pen.textAlign = "left";
  for (const [stage, first, last] of info.stages) {
    const top = Math.max(yOf(first, height), TOP), bottom = Math.min(yOf(last, height), height);
    if (bottom - top < 12) continue;
    pen.fillStyle = colours.rule.text;
    pen.fillRect(0, bottom - 1, width, 1);
    pen.fillStyle = colours.ink.text;
    pen.fillText(`stage ${stage}`, 2, (top + bottom) / 2);
  }
}

/** Height and top of the rows of all lanes; a lane ends with a track for the critical path. */
const LANE_GAP = 10;
function laneLayout(height) {
  const rows = lanes.reduce((sum, lane) => sum + lane.rows.length, 0);
  const row = (height - TOP - lanes.length * LANE_GAP) / rows;
  let top = TOP;
  return lanes.map((lane) => {
    const place = { top, row, bottom: top + row * lane.rows.length };
    top = place.bottom + LANE_GAP;
    return place;
  });
}

function mixed(parts, whole) {
  const sum = [0, 0, 0];
  let rest = whole;
  for (const [part, length] of Object.entries(parts)) {
    const share = Math.min(length, Math.max(rest, 0));
    rest -= share;
    colours[part].rgb.forEach((value, i) => (sum[i] += value * share));
  }
  return `rgb(${sum.map((value, i) =>
    Math.round((value + colours.gap.rgb[i] * Math.max(rest, 0)) / whole)).join()})`;
}

function drawRow(pen, row, y, high, width) {
  const nsPerPx = (view.t1 - view.t0) / (width - LEFT);
  let pixel = -1, parts = {};
  const flush = () => {
    if (pixel < 0) return;
    pen.fillStyle = mixed(parts, nsPerPx);
    pen.fillRect(pixel, y, 1, high);
    pixel = -1;
    parts = {};
  };
  for (let at = firstAbove(row.reach, view.t0); at < row.spans.length; at++) {
    const i = row.spans[at];
    if (spans.start[i] >= view.t1) break;
    const local = !isCommunication(i);
    const left = xOf(spans.start[i], width);
    const right = xOf(spans.start[i] + spans.duration[i], width);
    if (right - left < 1.5) {
      // Too narrow to draw: spans of one pixel share its colour.
      if (Math.floor(left) !== pixel) { flush(); pixel = Math.floor(left); }
      const [one, other, first] = local
        ? ["inner_idle", "compute", spans.idle[i]] : ["wait", "transfer", spans.wait[i]];
      parts[one] = (parts[one] || 0) + first;
      parts[other] = (parts[other] || 0) + spans.duration[i] - first;
      continue;
    }
    flush();
    drawSpan(pen, i, local, Math.max(left, LEFT - 2), Math.min(right, width + 2), y, high, width);
  }
  flush();
}

const isCommunication = (i) => !["compute", "memcpy"].includes(info.kinds[spans.kind[i]]);

function drawSpan(pen, i, local, left, right, y, high, width) {
  // A hair of background keeps neighbours apart.
  const wide = right - left - (right - left > 3 ? 0.75 : 0);
  if (local) {
    // The idle part of a span is shown as the part of its height that is not filled.
    const idle = high * (spans.idle[i] / Math.max(spans.duration[i], 1));
    pen.fillStyle = colours.inner_idle.text;
    pen.fillRect(left, y, wide, idle);
    pen.fillStyle = colours.compute.text;
    pen.fillRect(left, y + idle, wide, high - idle);
  } else {
    const ready = Math.min(Math.max(xOf(spans.start[i] + spans.wait[i], width), left), right);
    pen.fillStyle = colours.wait.text;
    pen.fillRect(left, y, Math.min(ready - left, wide), high);
    pen.fillStyle = colours.transfer.text;
    pen.fillRect(ready, y, Math.max(left + wide - ready, 0), high);
  }
  if (high < 13 || wide < 46) return;
  const name = spans.name[i] ? info.names[spans.name[i] - 1] : info.kinds[spans.kind[i]];
  const fits = Math.floor((wide - 8) / 5.7);
  const text = name.length > fits ? name.slice(0, fits - 1) + "…" : name;
  pen.textAlign = "left";
  const [red, green, blue] = colours[local ? "compute" : spans.wait[i] * 2 > spans.duration[i] ? "wait" : "transfer"].rgb;
  pen.fillStyle = 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111" : "#fff";
  if (local && spans.idle[i] * 2 > spans.duration[i]) pen.fillStyle = colours.ink.text;
  pen.fillText(text, left + 4, y + high / 2 + 0.5);
}

function drawLanes() {
  const { pen, width, height } = prepare(laneCanvas);
  const places = laneLayout(height);
  lanes.forEach((lane, number) => {
    const { top, row, bottom } = places[number];
    pen.fillStyle = colours.gap.text;
    pen.fillRect(LEFT, top, width - LEFT, bottom - top);
    pen.fillStyle = colours.ink.text;
    pen.textAlign = "left";
    pen.fillText(`rank ${lane.rank}`, 2, top + 7);
    const stage = stageOf(lane.line);
    pen.fillStyle = colours.muted.text;
    const notes = [stage === null ? "" : `stage ${stage}`, ...lane.why.split(", ")].filter(Boolean);
    notes.slice(0, Math.floor((bottom - top) / 13) - 1)
      .forEach((note, i) => pen.fillText(shortened(pen, note, LEFT - 6), 2, top + 20 + 13 * i));
    clipToPlot(pen, width, height);
    lane.rows.forEach((rowSpans, i) =>
      drawRow(pen, rowSpans, top + i * row + (i ? 0.5 : 0), row - (i ? 0.5 : 0), width));
    pen.restore();
  });
  clipToPlot(pen, width, height);
  if (byId("show-path").checked) {
    const track = new Map(lanes.map((lane, i) => [lane.line, places[i].bottom + 3.5]));
    drawPath(pen, width, (line) => track.get(line) ?? null);
  }
  if (selected) {
    const { top, row } = places[selected.lane], i = selected.span;
    pen.strokeStyle = colours.ink.text;
    pen.lineWidth = 2;
    const left = xOf(spans.start[i], width);
    pen.strokeRect(left, top + spans.row[i] * row, Math.max(xOf(spans.start[i] + spans.duration[i], width) - left, 2), row);
  }
  pen.restore();
  drawAxis(pen, width, height);
}

function shortened(pen, text, width) {
  while (text.length > 3 && pen.measureText(text).width > width) text = text.slice(0, -2) + "…";
  return text;
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; drawAll(); });
}

function drawAll() {
  drawMap();
  drawLanes();
}

/* Moves about in the timeline by pointer, wheel and keys, tells what is where, and starts it all. */
"use strict";

// ---- moving about -------------------------------------------------------------------------

function clampView() {
  const span = Math.min(Math.max(view.t1 - view.t0, 100), info.window);
  view.t0 = Math.min(Math.max(view.t0, 0), info.window - span);
  view.t1 = view.t0 + span;
  const lines = Math.min(Math.max(view.l1 - view.l0, Math.min(4, lineCount)), lineCount);
  view.l0 = Math.min(Math.max(view.l0, 0), lineCount - lines);
  view.l1 = view.l0 + lines;
  byId("shown").textContent = view.t1 - view.t0 >= info.window ? `whole window, ${time(info.window)}`
    : `${time(view.t0)} to ${time(view.t1)} (${time(view.t1 - view.t0)})`;
  redraw();
}

function zoomTime(factor, around = (view.t0 + view.t1) / 2) {
  const span = Math.min(Math.max((view.t1 - view.t0) * factor, 100), info.window);
  const part = (around - view.t0) / (view.t1 - view.t0);
  view.t0 = around - part * span;
  view.t1 = view.t0 + span;
  clampView();
}

function zoomLines(factor, around = (view.l0 + view.l1) / 2) {
  const lines = Math.min(Math.max((view.l1 - view.l0) * factor, Math.min(4, lineCount)), lineCount);
  const part = (around - view.l0) / (view.l1 - view.l0);
  view.l0 = around - part * lines;
  view.l1 = view.l0 + lines;
  clampView();
}

function panTime(share) {
  const by = share * (view.t1 - view.t0);
  view.t0 += by;
  view.t1 += by;
  clampView();
}

function panLines(share) {
  const by = share * (view.l1 - view.l0);
  view.l0 += by;
  view.l1 += by;
  clampView();
}

function showAll() {
  Object.assign(view, { t0: 0, t1: info.window, l0: 0, l1: lineCount });
  clampView();
}

function goToRank(rank) {
  const line = info.ranks.indexOf(rank);
  if (line < 0) { spoken.textContent = `no rank ${rank}`; return; }
  const half = Math.min(16, lineCount / 2);
  view.l0 = line + 0.5 - half;
  view.l1 = line + 0.5 + half;
  spoken.textContent = rankText(line);
  clampView();
}

function select(lane, span) {
  selected = { lane, span };
  const end = spans.start[span] + spans.duration[span];
  if (spans.start[span] < view.t0 || end > view.t1) {
    const width = Math.max(view.t1 - view.t0, spans.duration[span] * 1.2);
    view.t0 = (spans.start[span] + end - width) / 2;
    view.t1 = view.t0 + width;
  }
  clampView();
  const lines = describeSpan(lanes[lane], span);
  spoken.textContent = lines.join("; ");
  const box = laneCanvas.getBoundingClientRect();
  const place = laneLayout(laneCanvas.clientHeight)[lane];
  const x = Math.max(xOf(spans.start[span], box.width), LEFT);
  showTip(lines, box.left + x, box.top + place.bottom);
}

/** The next span in a direction: in the lane, or on the critical path of any lane. */
function selectNext(direction, onPath) {
  const lane = selected ? selected.lane : 0;
  if (onPath) {
    const from = selected ? spans.start[selected.span] : view.t0 - direction;
    let best = null;
    lanes.forEach((other, number) => {
      for (let i = other.first; i < other.last; i++) {
        if (!spans.critical[i] || (spans.start[i] - from) * direction <= 0) continue;
        if (best === null || (spans.start[i] - spans.start[best.span]) * direction < 0)
          best = { lane: number, span: i };
      }
    });
    if (best) select(best.lane, best.span);
    return;
  }
  const { first, last } = lanes[lane];
  let span = selected ? selected.span + direction : first;
  if (!selected) while (span + 1 < last && spans.start[span] < view.t0) span++;
  if (span >= first && span < last) select(lane, span);
}

function selectLane(direction) {
  const lane = Math.min(Math.max((selected ? selected.lane : -direction) + direction, 0), lanes.length - 1);
  const from = selected ? spans.start[selected.span] : view.t0;
  let span = lanes[lane].first;
  while (span + 1 < lanes[lane].last && spans.start[span] < from) span++;
  select(lane, span);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inMap = event.currentTarget === map;
  const actions = {
    ArrowLeft: () => panTime(-0.15), ArrowRight: () => panTime(0.15),
    ArrowUp: () => (inMap ? panLines(-0.15) : selectLane(-1)),
    ArrowDown: () => (inMap ? panLines(0.15) : selectLane(1)),
    "+": () => zoomTime(0.6), "=": () => zoomTime(0.6), "-": () => zoomTime(1 / 0.6),
    "]": () => zoomLines(0.6), "[": () => zoomLines(1 / 0.6),
    n: () => selectNext(1, false), p: () => selectNext(-1, false),
    c: () => selectNext(1, true), C: () => selectNext(-1, true),
    0: showAll, Home: showAll,
    Escape: () => { selected = null; hideTip(); redraw(); },
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((text, i) => {
    const line = document.createElement(i ? "div" : "strong");
    line.textContent = text;
    return line;
  }));
  tip.hidden = false;
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - wide - 8))}px`;
  tip.style.top = `${y + 14 + high > innerHeight ? Math.max(4, y - high - 10) : y + 14}px`;
}

function hideTip() { tip.hidden = true; }

function hoverMap(x, y, width, height) {
  const line = Math.floor(lineOf(y, height)), t = tOf(x, width);
  const number = bestGrid(width, height), grid = info.grids[number];
  const bin = Math.floor((t / info.window) * grid.bins);
  const gridLine = Math.floor(line / grid.ranksPerLine);
  if (x < LEFT || y < TOP || bin < 0 || bin >= grid.bins || line < 0 || line >= lineCount) return null;
  const shares = bytesOf(`grid${number}`), cells = grid.lines * grid.bins;
  const first = gridLine * grid.ranksPerLine;
  const last = Math.min(first + grid.ranksPerLine, lineCount) - 1;
  const width_ns = info.window / grid.bins;
  const lines = [first === last ? rankText(first) : `ranks ${info.ranks[first]} to ${info.ranks[last]}`,
    `${time(bin * width_ns)} to ${time((bin + 1) * width_ns)}`];
  let rest = LEVELS;
  info.parts.forEach((part, i) => {
    const share = shares[i * cells + gridLine * grid.bins + bin];
    rest -= share;
    if (share) lines.push(`${PART_NAMES[part]} about ${Math.round((share / LEVELS) * 100)} %`);
  });
  if (rest > 0) lines.push(`${PART_NAMES.gap} about ${Math.round((rest / LEVELS) * 100)} %`);
  return lines;
}

function hoverLanes(x, y, width, height) {
  if (x < LEFT) return null;
  const places = laneLayout(height);
  const number = places.findIndex(({ top, bottom }) => y >= top && y < bottom);
  if (number < 0) return null;
  const lane = lanes[number], place = places[number];
  const row = lane.rows[Math.min(Math.floor((y - place.top) / place.row), lane.rows.length - 1)];
  const near = (1.5 * (view.t1 - view.t0)) / (width - LEFT), t = tOf(x, width);
  let found = null, distance = near;
  for (let at = firstAbove(row.reach, t - near); at < row.spans.length; at++) {
    const i = row.spans[at], start = spans.start[i], end = start + spans.duration[i];
    if (start > t + near) break;
    const away = t < start ? start - t : t > end ? t - end : 0;
    if (away <= distance) { found = i; distance = away; }
  }
  return found === null ? [rankText(lane.line), `${time(t)}: nothing on ${lane.streams[lane.rows.indexOf(row)]}`]
    : describeSpan(lane, found);
}

function listen(canvas, hover) {
  let drag = null;
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, y: event.offsetY, ...view };
    hideTip();
  });
  canvas.addEventListener("pointerup", () => (drag = null));
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointermove", (event) => {
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (drag) {
      const dt = ((drag.x - event.offsetX) / (width - LEFT)) * (drag.t1 - drag.t0);
      view.t0 = drag.t0 + dt;
      view.t1 = drag.t1 + dt;
      if (canvas === map) {
        const dl = ((drag.y - event.offsetY) / (height - TOP)) * (drag.l1 - drag.l0);
        view.l0 = drag.l0 + dl;
        view.l1 = drag.l1 + dl;
      }
      clampView();
      return;
    }
    const lines = hover(event.offsetX, event.offsetY, width, height);
    if (lines) showTip(lines, event.clientX, event.clientY);
    else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("dblclick", (event) => zoomTime(0.25, tOf(event.offsetX, canvas.clientWidth)));
  canvas.addEventListener("wheel", (event) => {
    // The page scrolls as usual unless the chart was clicked or Ctrl is held.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const factor = Math.exp(Math.sign(event.deltaY || event.deltaX) * 0.2);
    if (event.shiftKey && canvas === map) zoomLines(factor, lineOf(event.offsetY, canvas.clientHeight));
    else zoomTime(factor, tOf(event.offsetX, canvas.clientWidth));
  }, { passive: false });
}

/** A link may name a part: #t=BEGIN,END in ns and #r=FIRST,LAST. */
function readLink() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const [t0, t1] = (wanted.get("t") || "").split(",").map(Number);
  if (t1 > t0) Object.assign(view, { t0, t1 });
  const [r0, r1] = (wanted.get("r") || "").split(",").map((rank) => info.ranks.indexOf(Number(rank)));
  if (r1 > r0 && r0 >= 0) Object.assign(view, { l0: r0, l1: r1 + 1 });
}

/** Unpacks, draws and listens. */
async function start() {
  block = await unpack();
  [spans, lanes] = readLanes();
  path = readPath();
  map.hidden = byId("map-title").hidden = lanes.length === lineCount;
  const rows = lanes.reduce((sum, lane) => sum + lane.rows.length, 0);
  const rowHeight = Math.min(Math.max(560 / rows, 9), 20);
  laneCanvas.style.height = `${TOP + rows * rowHeight + lanes.length * LANE_GAP}px`;
  readColours();
  paintGrids();
  readLink();
  listen(map, hoverMap);
  listen(laneCanvas, hoverLanes);
  const buttons = {
    "zoom-in": () => zoomTime(0.5), "zoom-out": () => zoomTime(2),
    earlier: () => panTime(-0.5), later: () => panTime(0.5), "show-all": showAll,
  };
  for (const [id, action] of Object.entries(buttons)) byId(id).addEventListener("click", action);
  byId("show-path").addEventListener("change", redraw);
  byId("go-to").addEventListener("change", (event) => goToRank(Number(event.target.value)));
  byId("go-to").parentElement.hidden = map.hidden;
  window.addEventListener("hashchange", () => { readLink(); clampView(); });
  new ResizeObserver(redraw).observe(laneCanvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    paintGrids();
    redraw();
  });
  clampView();
  drawAll();
  document.documentElement.dataset.timeline = "ready";
}

start().catch((error) => {
  document.documentElement.dataset.timeline = "failed";
  const note = document.getElementById("timeline-failed");
  note.hidden = false;
  note.textContent = `The timeline cannot be drawn in this browser (${error.message}). All tables are complete.`;
});

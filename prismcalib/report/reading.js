/* What the timeline shows: unpacks what prismcalib/report/encode.py wrote, and says it in words.
 *
 * Time is in ns from the begin of the window; a "line" is a rank by its place among all ranks.
 */
"use strict";

const byId = (id) => document.getElementById(id);
const info = JSON.parse(byId("timeline-description").textContent);
const LEVELS = 15; // shares in grids are 0 to LEVELS
const LEFT = 112; // px for labels
const TOP = 22; // px for the time axis
const lineCount = info.ranks.length;

// Tests look for it; people see the page's own words.
window.addEventListener("error", (event) => {
  document.documentElement.dataset.scriptError = event.message;
});

// ---- reading ------------------------------------------------------------------------------

async function unpack() {
  const packed = Uint8Array.from(atob(byId("timeline-block").textContent.trim()), (c) =>
    c.charCodeAt(0),
  );
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function bytesOf(name) {
  const [begin, length] = info.arrays[name];
  return block.subarray(begin, begin + length);
}

/** Whole numbers stored as LEB128. */
function numbersOf(name) {
  const bytes = bytesOf(name);
  let count = 0;
  for (const byte of bytes) count += byte < 128;
  const numbers = new Float64Array(count);
  let value = 0, scale = 1, place = 0;
  for (const byte of bytes) {
    value += (byte & 127) * scale;
    scale *= 128;
    if (byte < 128) {
      numbers[place++] = value;
      value = 0;
      scale = 1;
    }
  }
  return numbers;
}

function addUp(numbers, first, last) {
  for (let i = first + 1; i < last; i++) numbers[i] += numbers[i - 1];
}

/** Spans of all lanes, one array a column; of each lane its spans row by row. */
function readLanes() {
  const columns = ["start", "duration", "wait", "idle", "kind", "row", "critical", "name",
    "group", "seq", "peer", "bytes", "step", "slack"];
  const spans = Object.fromEntries(columns.map((name) => [name, numbersOf(name)]));
  let first = 0;
  const lanes = info.lanes.map((lane) => {
    const last = first + lane.spans;
    addUp(spans.start, first, last);
    const rows = lane.streams.map(() => ({ spans: [], reach: [] }));
    for (let i = first; i < last; i++) rows[spans.row[i]].spans.push(i);
    for (const row of rows) {
      let reach = 0; // latest end so far: ascending, so that it can be searched
      row.reach = row.spans.map((i) => (reach = Math.max(reach, spans.start[i] + spans.duration[i])));
    }
    const result = { ...lane, first, last, rows, line: info.ranks.indexOf(lane.rank) };
    first = last;
    return result;
  });
  return [spans, lanes];
}

function readPath() {
  const start = numbersOf("path_start");
  addUp(start, 0, start.length);
  return { line: numbersOf("path_line"), start, length: numbersOf("path_length") };
}

/** First place whose value is above the limit. */
function firstAbove(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// ---- words --------------------------------------------------------------------------------

function time(ns, digits = 3) {
  const [scale, unit] = Math.abs(ns) >= 1e10 ? [1e9, "s"]
    : Math.abs(ns) >= 1e6 ? [1e6, "ms"] : Math.abs(ns) >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${(ns / scale).toFixed(unit === "ns" ? 0 : digits)} ${unit}`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < 4) { bytes /= 1024; unit++; }
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

function stageOf(line) {
  const band = info.stages.find(([, first, last]) => line >= first && line < last);
  return band ? band[0] : null;
}

function rankText(line) {
  const stage = stageOf(line);
  return `rank ${info.ranks[line]}` + (stage === null ? "" : ` (stage ${stage})`);
}

const PART_NAMES = {
  compute: "computing", inner_idle: "idle inside spans", transfer: "transferring",
  wait: "waiting", gap: "idle between spans",
};

function describeSpan(lane, i) {
  const kind = info.kinds[spans.kind[i]];
  const lines = [spans.name[i] ? info.names[spans.name[i] - 1] : kind];
  const facts = [rankText(lane.line), lane.streams[spans.row[i]]];
  if (spans.step[i]) facts.push(`step ${spans.step[i] - 1}`);
  lines.push(facts.join(" · "));
  if (spans.group[i]) {
    let text = `${kind} in group ${info.groups[spans.group[i] - 1]}`;
    if (spans.seq[i]) text += `, seq ${spans.seq[i] - 1}`;
    if (spans.peer[i]) text += `, peer ${spans.peer[i] - 1}`;
    if (spans.bytes[i]) text += `, ${size(spans.bytes[i] - 1)}`;
    lines.push(text);
  } else lines.push(kind);
  const end = spans.start[i] + spans.duration[i];
  lines.push(`${time(spans.duration[i])}: from ${time(spans.start[i])} to ${time(end)}`);
  if (spans.wait[i])
    lines.push(`waits ${time(spans.wait[i])}, transfers ${time(spans.duration[i] - spans.wait[i])}`);
  if (spans.idle[i]) lines.push(`${time(spans.idle[i])} of it idle between kernels`);
  if (spans.critical[i]) lines.push("on the critical path");
  else if (spans.slack[i]) lines.push(`slack ${time(spans.slack[i] - 1)}`);
  return lines;
}

"use strict";
// The curves and heads of a run. Live, the data comes from the server every two seconds; offline, it is in the page.

const POLL_MS = 2000;
const MARGIN = { left: 52, right: 10, top: 8, bottom: 22 };
const HEIGHT = 190;
const OWN = { training: "var(--training)", evaluation: "var(--evaluation)" };
const SVG = "http://www.w3.org/2000/svg";
const STOPPED = "the server has stopped; start regard view again";
const embedded = document.getElementById("data");
const stored = embedded ? JSON.parse(embedded.textContent) : null;
const byId = (id) => document.getElementById(id);
let data = null;
let failed = null; // why the last request failed
let pointed = null; // the step under the pointer

function make(name, attributes = {}, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function makeHtml(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function colour(label, n, count) {
  return OWN[label] || `hsl(${Math.round(265 - (265 * n) / Math.max(count, 2))} 55% 55%)`;
}

function format(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4);
}

function smoothed(values, weight) {
  // Exponential moving average, corrected for its start, as Adam's moments are.
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++)
    for (const n of high - low < 2 ? [1, 2, 5] : [1]) {
      const at = power + Math.log10(n);
      if (at >= low - 1e-9 && at <= high + 1e-9) found.push(at);
    }
  return found.length > 1 ? found : [low, high];
}

function tickLabel(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(0);
  if (size < 1e4) return String(Number(value.toPrecision(3)));
  return size < 1e6 ? `${Number((value / 1e3).toPrecision(3))}k` : `${Number((value / 1e6).toPrecision(3))}M`;
}

function path(points) {
  let text = "", pen = false;
  for (const [x, y] of points) {
    if (y === null) pen = false;
    else {
      text += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = true;
    }
  }
  return text;
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

function drawPanel(panel, lastStep) {
  const weight = Number(byId("smooth").value);
  const shown = panel.lines.map((line) => ({ ...line, drawn: weight && line.label !== "evaluation" ? smoothed(line.values, weight) : line.values }));
  const all = shown.flatMap((line) => line.values).filter((value) => value !== null);
  const isLog = byId("log").checked && all.length > 0 && all.every((value) => value > 0);
  const scale = (value) => (value === null ? null : isLog ? Math.log10(value) : value);
  let low = Math.min(...all.map(scale)), high = Math.max(...all.map(scale));
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];

  const section = makeHtml("section");
  section.append(makeHtml("h2", panel.name));
  const values = makeHtml("div", undefined, "values");
  section.append(values);
  shown.forEach((line, n) => {
    if (n >= 6) return;
    const item = makeHtml("span");
    const swatch = makeHtml("span", undefined, "swatch");
    swatch.style.background = colour(line.label, n, shown.length);
    const at = pointed === null ? line.steps.length - 1 : nearest(line.steps, pointed);
    item.append(swatch, `${line.label} `, makeHtml("b", format(line.values[at])), ` at ${line.steps[at].toLocaleString("en")}`);
    values.append(item);
  });
  if (shown.length > 6) values.append(makeHtml("span", `and ${shown.length - 6} more`));

  const width = Math.max(byId("panels").clientWidth ? sectionWidth() : 320, 200);
  const svg = make("svg", { role: "img", viewBox: `0 0 ${width} ${HEIGHT}` });
  svg.append(make("title", {}, `${panel.name} by step`));
  const x = (step) => MARGIN.left + (step / (lastStep || 1)) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => value === null ? null
    : HEIGHT - MARGIN.bottom - ((scale(value) - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  if (all.length) {
    for (const at of isLog ? logTicks(low, high) : ticks(low, high, 4)) {
      const value = isLog ? 10 ** at : at, height = y(value);
      svg.append(make("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: height, y2: height }));
      svg.append(make("text", { x: MARGIN.left - 6, y: height + 4, "text-anchor": "end" }, tickLabel(value)));
    }
  }
  for (const at of ticks(0, lastStep || 1, 4).filter(Number.isInteger))
    svg.append(make("text", { x: x(at), y: HEIGHT - 5, "text-anchor": "middle" }, tickLabel(at)));
  if (data.best !== null) svg.append(make("line", { class: "best", x1: x(data.best), x2: x(data.best), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
  shown.forEach((line, n) => {
    const stroke = colour(line.label, n, shown.length);
    const points = (numbers) => numbers.map((value, at) => [x(line.steps[at]), y(value)]);
    if (line.drawn !== line.values) svg.append(make("path", { class: "line raw", stroke, d: path(points(line.values)) }));
    svg.append(make("path", { class: "line", stroke, d: path(points(line.drawn)) }));
    if (line.values.length <= 60)
      for (const [left, top] of points(line.values))
        if (top !== null && (line.label === "evaluation" || line.values.length === 1))
          svg.append(make("circle", { cx: left, cy: top, r: 2.5, fill: stroke }));
  });
  if (pointed !== null) svg.append(make("line", { class: "cross", x1: x(pointed), x2: x(pointed), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    pointed = Math.round(Math.min(Math.max(share, 0), 1) * lastStep);
    schedule();
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => { pointed = null; schedule(); });
  section.append(svg);
  const missing = shown.reduce((sum, line) => sum + line.values.filter((value) => value === null).length, 0);
  const each = Math.max(...shown.map((line) => line.each));
  const notes = [];
  if (each > 1) notes.push(`a point is the mean of ${each} rows`);
  if (missing) notes.push(`${missing} ${missing > 1 ? "values are" : "value is"} not finite`);
  if (notes.length) section.append(makeHtml("p", notes.join("; "), "note"));
  return section;
}

function sectionWidth() {
  const columns = getComputedStyle(byId("panels")).gridTemplateColumns.split(" ");
  return parseFloat(columns[0]) - 26;
}

function age(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

function drawState(lastStep) {
  const parts = [];
  parts.push(data.trainer ? `training, ${data.trainer}` : "not training");
  parts.push(`step ${lastStep.toLocaleString("en")}${data.steps ? ` of ${data.steps.toLocaleString("en")}` : ""}`);
  if (data.best !== null) parts.push(`best checkpoint: step ${data.best.toLocaleString("en")}`);
  if (data.updated !== null)
    parts.push(stored ? `as of ${new Date(data.updated * 1000).toLocaleString()}` : `last row ${age(Date.now() / 1000 - data.updated)}`);
  const state = byId("state");
  state.textContent = failed || parts.join(" · ");
  state.className = failed ? "failed" : data.trainer && !stored ? "live" : "";
}

function drawSettings() {
  const groups = Object.entries(data.settings).filter(([, settings]) => Object.keys(settings).length);
  byId("settings").hidden = !groups.length;
  byId("groups").replaceChildren(...groups.map(([name, settings]) => {
    const table = makeHtml("table");
    table.append(makeHtml("caption", name));
    for (const [key, value] of Object.entries(settings)) {
      const row = table.insertRow();
      row.append(makeHtml("td", key), makeHtml("td", value));
    }
    return table;
  }));
}

function draw() {
  if (data === null) {
    byId("state").textContent = failed || "";
    byId("state").className = failed ? "failed" : "";
    return;
  }
  const lastStep = Math.max(0, ...data.panels.flatMap((panel) => panel.lines.map((line) => line.steps.at(-1))));
  drawState(lastStep);
  if (byId("curves").hidden) return;
  const pending = makeHtml("p", "No row of the log is written yet.");
  const sections = data.panels.map((panel) => drawPanel(panel, lastStep));
  const panels = byId("panels");
  // A panel under the pointer stays in the document, so that the pointer does not leave it; its content is replaced.
  if (panels.childElementCount === sections.length && sections.length)
    sections.forEach((section, n) => update(panels.children[n], section));
  else panels.replaceChildren(...(sections.length ? sections : [pending]));
}

function update(before, after) {
  const [svg, next] = [before.querySelector("svg"), after.querySelector("svg")];
  before.querySelector(".values").replaceWith(after.querySelector(".values"));
  if (!svg || svg.getAttribute("viewBox") !== next.getAttribute("viewBox") || pointed === null) svg.replaceWith(next);
  else svg.replaceChildren(...next.childNodes);
  before.querySelector("h2").replaceWith(after.querySelector("h2"));
  before.querySelector(".note")?.remove();
  const note = after.querySelector(".note");
  if (note) before.append(note);
}

// The tab of heads: its maps are drawn while it is shown, from data of the version that the run has now.
const drawHeads = headMaps(byId("heads"));
const tabs = ["curves", "heads"];
let headsDrawn = null; // the version that is drawn
let headsAsked = false; // whether a request is under way

function openTab(name) {
  for (const each of tabs) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  try {
    history.replaceState(null, "", `#${name}`);
  } catch {
    // A frame in a notebook has no address of its own.
  }
  if (name === "heads") updateHeads();
  else schedule();
}

function showTabs() {
  const tabsHidden = data === null || data.heads_version === null;
  if (byId("tabs").hidden && !tabsHidden) {
    for (const id of tabs) {
      byId(id).setAttribute("role", "tabpanel");
      byId(id).setAttribute("aria-labelledby", `tab-${id}`);
    }
    byId("tabs").hidden = false;
    if (location.hash === "#heads") openTab("heads");
  }
}

async function updateHeads() {
  const version = data.heads_version;
  if (byId("heads").hidden || headsAsked || headsDrawn === version) return;
  headsAsked = true;
  try {
    const answer = stored ? null : await fetch("api/heads");
    const found = stored ? stored.heads : await answer.json();
    if (answer && !answer.ok) failed = `${found.error}: ${found.hint}`;
    else {
      headsDrawn = version;
      if (!byId("heads").hidden) drawHeads(found);
      else headsDrawn = null;
    }
  } catch {
    failed = STOPPED;
  }
  headsAsked = false;
  schedule();
}

let waiting = false;
function schedule() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

async function poll() {
  try {
    const answer = await fetch("api/run");
    const found = await answer.json();
    failed = answer.ok ? null : `${found.error}: ${found.hint}`;
    if (answer.ok) {
      const settings = data === null || JSON.stringify(data.settings) !== JSON.stringify(found.settings);
      data = found;
      if (settings) drawSettings();
      showTabs();
      updateHeads();
    }
  } catch {
    failed = STOPPED;
  }
  schedule();
  setTimeout(whenVisible, POLL_MS);
}

function whenVisible() {
  if (!document.hidden) poll();
  else document.addEventListener("visibilitychange", whenVisible, { once: true });
}

for (const id of ["log", "smooth"]) byId(id).addEventListener("input", schedule);
addEventListener("resize", schedule);
for (const name of tabs) {
  byId(`tab-${name}`).addEventListener("click", () => openTab(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs.find((each) => each !== name);
    openTab(other);
    byId(`tab-${other}`).focus();
  });
}
if (stored) {
  data = stored.run;
  drawSettings();
  showTabs();
  draw();
} else poll();

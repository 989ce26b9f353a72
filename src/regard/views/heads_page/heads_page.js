"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => ({ layer: layer.name, head })));
const ROW = Math.max(4, Math.min(14, Math.round(420 / rows.length)));
const maps = [];
let chosen = data.steps.length - 1;

function element(name, text, parent, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  if (parent) parent.append(made);
  return made;
}

const shown = (x) => (x === null ? "not measured" : Number(x.toPrecision(4)).toString());
const headName = (row) => `${row.layer}, head ${row.head}`;

// The colours of the figures: white at 0, then magma reversed.
const STOPS = [[255, 255, 255], [254, 207, 146], [252, 137, 97], [183, 55, 121], [81, 18, 124], [0, 0, 4]];
function colour(share) {
  const at = Math.max(0, Math.min(1, share)) * (STOPS.length - 1);
  const n = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[n].map((low, c) => low + (STOPS[n + 1][c] - low) * (at - n));
}

function addMap(measure) {
  const section = element("section", undefined, document.getElementById("maps"));
  element("h2", measure.label, section);
  const largest = measure.values.flat().reduce((most, x) => (x !== null && x > most ? x : most), 0) || 1;
  element("p", `white: 0 or less, black: ${shown(largest)}, grey: not measured`, section, "scale");
  const box = element("div", undefined, section, "map");
  const names = element("div", undefined, box, "names");
  const canvas = element("canvas", undefined, box);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${measure.label} of ${rows.length} heads at ${data.steps.length} steps`);
  canvas.style.height = `${rows.length * ROW}px`;
  let first = 0;
  const every = Math.ceil(data.layers.length / Math.max(1, Math.floor((rows.length * ROW) / 14)));
  data.layers.forEach((layer, n) => {
    if (n % every === 0) element("span", layer.name, names).style.top = `${(first + layer.heads / 2) * ROW}px`;
    first += layer.heads;
  });
  names.style.width = `${Math.max(...[...names.children].map((each) => each.offsetWidth), 40)}px`;
  const steps = element("div", undefined, box, "steps");
  element("span", `step ${data.steps[0].toLocaleString("en")}`, steps);
  element("span", `step ${data.steps.at(-1).toLocaleString("en")}`, steps);
  maps.push({ measure, canvas, largest });
  canvas.addEventListener("pointermove", (event) => say(...cellAt(canvas, event)));
  canvas.addEventListener("click", (event) => choose(cellAt(canvas, event)[0]));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) choose(Math.max(0, Math.min(data.steps.length - 1, chosen + move)));
  });
}

function cellAt(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const limit = (share, n) => Math.max(0, Math.min(n - 1, Math.floor(share * n)));
  return [limit((event.clientX - box.left) / box.width, data.steps.length), limit((event.clientY - box.top) / box.height, rows.length)];
}

function say(n, row) {
  const numbers = data.measures.map((measure) => `${measure.name} ${shown(measure.values[row][n])}`);
  document.getElementById("cell").textContent = `step ${data.steps[n].toLocaleString("en")} · ${headName(rows[row])} · ${numbers.join(" · ")}`;
}

function draw({ measure, canvas, largest }) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  const context = canvas.getContext("2d");
  const wide = canvas.width / data.steps.length, high = canvas.height / rows.length;
  rows.forEach((_, row) => data.steps.forEach((_, n) => {
    const x = measure.values[row][n];
    context.fillStyle = x === null ? "#9fb4c0" : `rgb(${colour(x / largest).join(" ")})`;
    context.fillRect(Math.floor(n * wide), Math.floor(row * high), Math.ceil(wide), Math.ceil(high));
  }));
  context.fillStyle = "#cccccc";
  let first = 0;
  for (const layer of data.layers.slice(0, -1)) context.fillRect(0, Math.round((first += layer.heads) * high), canvas.width, ratio);
  context.lineWidth = 1.5 * ratio;
  for (const event of data.events.filter((each) => each.panel === measure.name)) {
    context.beginPath();
    context.arc((event.at + 0.5) * wide, (event.row + 0.5) * high, 3.5 * ratio, 0, 7);
    context.fillStyle = "#ffffff";
    context.fill();
    context.strokeStyle = event.kind === "clipped" ? "#b73779" : "#3b0f70";
    context.stroke();
  }
  context.strokeStyle = "#1f9ecf";
  context.strokeRect(chosen * wide, 0, Math.max(wide, ratio), canvas.height);
}

function choose(n) {
  chosen = n;
  maps.forEach(draw);
  const section = document.getElementById("step");
  section.hidden = false;
  section.replaceChildren();
  element("h2", `Step ${data.steps[n].toLocaleString("en")}`, section);
  const table = element("table", undefined, section);
  const head = element("tr", undefined, table);
  for (const name of ["head", ...data.measures.map((measure) => measure.name)]) element("th", name, head, name === "head" ? "" : "number");
  rows.forEach((row, at) => {
    const line = element("tr", undefined, table);
    element("td", headName(row), line);
    for (const measure of data.measures) element("td", shown(measure.values[at][n]), line, "number");
  });
}

function listEvents() {
  const section = document.getElementById("events");
  if (!data.events.length) element("p", "No rule found an event.", section, "scale");
  const table = element("table", undefined, section);
  for (const event of data.events) {
    const line = element("tr", undefined, table);
    const button = element("button", `step ${event.step.toLocaleString("en")}`, element("td", undefined, line));
    button.addEventListener("click", () => choose(event.at));
    for (const text of [event.kind, event.where, event.text]) element("td", text, line);
  }
}

document.getElementById("about").textContent = data.about;
data.measures.forEach(addMap);
listEvents();
maps.forEach(draw);
window.addEventListener("resize", () => maps.forEach(draw));

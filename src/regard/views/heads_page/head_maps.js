"use strict";
// Heads over steps: a heat map for each measure, the events, and the numbers of one step, drawn into an element.

const headMaps = (() => {
  // The colours of the figures: white at 0, then magma reversed.
  const STOPS = [[255, 255, 255], [254, 207, 146], [252, 137, 97], [183, 55, 121], [81, 18, 124], [0, 0, 4]];
  const MISSING = "#9fb4c0";

  function colour(share) {
    const at = Math.max(0, Math.min(1, share)) * (STOPS.length - 1);
    const n = Math.min(Math.floor(at), STOPS.length - 2);
    return STOPS[n].map((low, c) => low + (STOPS[n + 1][c] - low) * (at - n));
  }

  function element(name, text, parent, kind) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    if (parent) parent.append(made);
    return made;
  }

  const shown = (x) => (x === null ? "not measured" : Number(x.toPrecision(4)).toString());
  const headName = (row) => `${row.layer}, head ${row.head}`;
  const stepName = (step) => `step ${step.toLocaleString("en")}`;

  // Return a function that draws data into `root`; the chosen step stays, or follows the last one.
  return function headMaps(root) {
    root.classList.add("heads");
    const about = element("p", undefined, root, "about");
    const cell = element("p", "Point at a cell, or click a step to see its numbers.", root, "cell");
    cell.setAttribute("role", "status");
    const main = element("div", undefined, root, "maps");
    const events = element("section", undefined, root, "events");
    const step = element("section", undefined, root, "step");
    let data = null, rows = [], maps = [], height = 4, chosen = null; // the number of a step; null: the last one

    function addMap(measure) {
      const section = element("section", undefined, main);
      element("h2", measure.label, section);
      const largest = measure.values.flat().reduce((most, x) => (x !== null && x > most ? x : most), 0) || 1;
      element("p", `white: 0 or less, black: ${shown(largest)}, grey: not measured`, section, "scale");
      const box = element("div", undefined, section, "map");
      const names = element("div", undefined, box, "names");
      const canvas = element("canvas", undefined, box);
      canvas.tabIndex = 0;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${measure.label} of ${rows.length} heads at ${data.steps.length} steps`);
      canvas.style.height = `${rows.length * height}px`;
      let first = 0;
      const every = Math.ceil(data.layers.length / Math.max(1, Math.floor((rows.length * height) / 14)));
      data.layers.forEach((layer, n) => {
        if (n % every === 0) element("span", layer.name, names).style.top = `${(first + layer.heads / 2) * height}px`;
        first += layer.heads;
      });
      names.style.width = `${Math.max(...[...names.children].map((each) => each.offsetWidth), 40)}px`;
      const ends = element("div", undefined, box, "steps");
      element("span", stepName(data.steps[0]), ends);
      element("span", stepName(data.steps.at(-1)), ends);
      maps.push({ measure, canvas, largest });
      canvas.addEventListener("pointermove", (event) => say(...cellAt(canvas, event)));
      canvas.addEventListener("click", (event) => choose(cellAt(canvas, event)[0]));
      canvas.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (move) choose(Math.max(0, Math.min(data.steps.length - 1, column() + move)));
      });
    }

    function cellAt(canvas, event) {
      const box = canvas.getBoundingClientRect();
      const limit = (share, n) => Math.max(0, Math.min(n - 1, Math.floor(share * n)));
      return [
        limit((event.clientX - box.left) / box.width, data.steps.length),
        limit((event.clientY - box.top) / box.height, rows.length),
      ];
    }

    function column() {
      const at = chosen === null ? -1 : data.steps.indexOf(chosen);
      return at < 0 ? data.steps.length - 1 : at;
    }

    function say(n, row) {
      const numbers = data.measures.map((measure) => `${measure.name} ${shown(measure.values[row][n])}`);
      cell.textContent = `${stepName(data.steps[n])} · ${headName(rows[row])} · ${numbers.join(" · ")}`;
    }

    function draw({ measure, canvas, largest }) {
      const ratio = window.devicePixelRatio || 1;
      canvas.width = Math.round(canvas.clientWidth * ratio);
      canvas.height = Math.round(canvas.clientHeight * ratio);
      const context = canvas.getContext("2d");
      const wide = canvas.width / data.steps.length, high = canvas.height / rows.length;
      rows.forEach((_, row) => data.steps.forEach((_, n) => {
        const x = measure.values[row][n];
        context.fillStyle = x === null ? MISSING : `rgb(${colour(x / largest).join(" ")})`;
        context.fillRect(Math.floor(n * wide), Math.floor(row * high), Math.ceil(wide), Math.ceil(high));
      }));
      context.fillStyle = "#cccccc";
      let first = 0;
      for (const layer of data.layers.slice(0, -1))
        context.fillRect(0, Math.round((first += layer.heads) * high), canvas.width, ratio);
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
      context.strokeRect(column() * wide, 0, Math.max(wide, ratio), canvas.height);
    }

    function choose(n) {
      chosen = data.steps[n];
      maps.forEach(draw);
      showStep();
    }

    function showStep() {
      const n = column();
      step.replaceChildren();
      const name = stepName(data.steps[n]);
      element("h2", name[0].toUpperCase() + name.slice(1), step);
      const table = element("table", undefined, step);
      const head = element("tr", undefined, table);
      for (const name of ["head", ...data.measures.map((measure) => measure.name)])
        element("th", name, head, name === "head" ? "" : "number");
      rows.forEach((row, at) => {
        const line = element("tr", undefined, table);
        element("td", headName(row), line);
        for (const measure of data.measures) element("td", shown(measure.values[at][n]), line, "number");
      });
    }

    function listEvents() {
      events.replaceChildren();
      element("h2", "Events", events);
      if (!data.events.length) element("p", "No rule found an event.", events, "scale");
      const table = element("table", undefined, events);
      for (const event of data.events) {
        const line = element("tr", undefined, table);
        const button = element("button", stepName(event.step), element("td", undefined, line));
        button.addEventListener("click", () => choose(event.at));
        for (const text of [event.kind, event.where, event.text]) element("td", text, line);
      }
    }

    window.addEventListener("resize", () => maps.forEach(draw));
    return (next) => {
      data = next;
      rows = data.layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => ({ layer: layer.name, head })));
      height = Math.max(4, Math.min(14, Math.round(420 / rows.length)));
      about.textContent = data.about;
      maps = [];
      main.replaceChildren();
      data.measures.forEach(addMap);
      listEvents();
      maps.forEach(draw);
      showStep();
    };
  };
})();

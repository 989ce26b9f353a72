// One query over six keys: the weights, and the gradient of one weight by the query. No library.
(function (root) {
  "use strict";

  const KEYS = [[1, 0.2], [0.4, 0.9], [-0.5, 0.8], [-0.9, -0.1], [-0.3, -0.9], [0.6, -0.7]];

  // Softmax of scale * q . k over the visible keys; a row that sees nothing is 0.
  function weights(q, keys, scale, visible) {
    const scores = keys.map((k, j) => (visible[j] ? scale * (q[0] * k[0] + q[1] * k[1]) : -Infinity));
    const top = Math.max(...scores);
    if (top === -Infinity) return scores.map(() => 0);
    const terms = scores.map(s => Math.exp(s - top));
    const total = terms.reduce((a, b) => a + b, 0);
    return terms.map(e => e / total);
  }

  // d A_c / d q = scale * A_c * (k_c - sum_j A_j k_j).
  function gradient(q, keys, scale, visible, chosen) {
    const A = weights(q, keys, scale, visible);
    return [0, 1].map(d => {
      const mean = keys.reduce((sum, k, j) => sum + A[j] * k[d], 0);
      return scale * A[chosen] * (keys[chosen][d] - mean);
    });
  }

  const model = { KEYS, weights, gradient };
  if (typeof module !== "undefined" && module.exports) module.exports = model;
  if (typeof document === "undefined") return;

  const SVG = "http://www.w3.org/2000/svg", SIZE = 300, REACH = 1.35, ARROW = 0.9;
  const place = x => SIZE / 2 + (x / REACH) * (SIZE / 2);

  function element(name, attributes, parent) {
    const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent.append(made);
    return made;
  }

  function start(host) {
    if (host.dataset.ready) return;
    host.dataset.ready = "true";
    const state = { q: [0.7, 0.4], scale: 2, visible: KEYS.map(() => true), chosen: 0 };
    const panel = element("div", { class: "softmax-panel" }, host);
    const svg = element("svg:svg", {
      viewBox: `0 0 ${SIZE} ${SIZE}`, tabindex: 0, role: "application",
      "aria-label": "The query and six keys; arrow keys move the query",
    }, panel);
    element("svg:path", { d: `M0 ${SIZE / 2}H${SIZE}M${SIZE / 2} 0V${SIZE}`, class: "axis" }, svg);
    const dots = KEYS.map((k, j) => {
      element("svg:line", { x1: place(0), y1: place(0), x2: place(k[0]), y2: place(-k[1]), class: "key-line" }, svg);
      const dot = element("svg:circle", { cx: place(k[0]), cy: place(-k[1]), r: 9, class: "key" }, svg);
      element("svg:text", { x: place(k[0]), y: place(-k[1]) + 4, class: "key-name" }, svg).textContent = j + 1;
      dot.addEventListener("click", () => choose(j));
      return dot;
    });
    const line = element("svg:line", { x1: place(0), y1: place(0), class: "query-line" }, svg);
    const arrow = element("svg:line", { class: "arrow" }, svg);
    const tip = element("svg:circle", { r: 4, class: "tip" }, svg);
    const query = element("svg:circle", { r: 11, class: "query" }, svg);
    const side = element("div", { class: "softmax-side" }, panel);
    const label = element("label", {}, side);
    label.append("scale ");
    const slider = element("input", { type: "range", min: 0, max: 20, step: 0.1, "aria-label": "scale" }, label);
    const shown = element("output", {}, label);
    const rows = KEYS.map((_, j) => {
      const row = element("div", { class: "softmax-row" }, side);
      const see = element("label", {}, row);
      const box = element("input", { type: "checkbox", "aria-label": `key ${j + 1} is visible` }, see);
      const name = element("button", { type: "button", "aria-label": `gradient of key ${j + 1}` }, row);
      name.textContent = `key ${j + 1}`;
      const track = element("span", { class: "track" }, row), bar = element("span", { class: "bar" }, track);
      const number = element("output", {}, row);
      box.addEventListener("change", () => { state.visible[j] = box.checked; draw(); });
      name.addEventListener("click", () => choose(j));
      return { box, name, bar, number };
    });
    const words = element("p", { class: "softmax-words", "aria-live": "polite" }, side);

    function choose(j) { state.chosen = j; draw(); }

    function draw() {
      const { q, scale, visible, chosen } = state;
      const A = weights(q, KEYS, scale, visible), g = gradient(q, KEYS, scale, visible, chosen);
      const end = [q[0] + ARROW * g[0], q[1] + ARROW * g[1]];
      for (const [made, x, y] of [[query, q[0], q[1]], [tip, end[0], end[1]]]) {
        made.setAttribute("cx", place(x));
        made.setAttribute("cy", place(-y));
      }
      line.setAttribute("x2", place(q[0]));
      line.setAttribute("y2", place(-q[1]));
      const ends = { x1: place(q[0]), y1: place(-q[1]), x2: place(end[0]), y2: place(-end[1]) };
      for (const [name, value] of Object.entries(ends)) arrow.setAttribute(name, value);
      slider.value = scale;
      shown.textContent = scale.toFixed(1);
      rows.forEach((row, j) => {
        row.box.checked = visible[j];
        row.bar.style.width = `${100 * A[j]}%`;
        row.number.textContent = A[j].toFixed(3);
        row.name.setAttribute("aria-pressed", String(j === chosen));
        dots[j].setAttribute("class", `key${j === chosen ? " chosen" : ""}${visible[j] ? "" : " hidden-key"}`);
      });
      words.textContent = `Gradient of the weight of key ${chosen + 1}: (${g[0].toFixed(3)}, ${g[1].toFixed(3)}), ` +
        `length ${Math.hypot(...g).toFixed(3)}.`;
    }

    function move(x, y) {
      state.q = [x, y].map(value => Math.max(-1.25, Math.min(1.25, value)));
      draw();
    }

    function follow(event) {
      const box = svg.getBoundingClientRect();
      move((2 * (event.clientX - box.left) / box.width - 1) * REACH, (1 - 2 * (event.clientY - box.top) / box.height) * REACH);
    }

    query.addEventListener("pointerdown", event => { query.setPointerCapture(event.pointerId); event.preventDefault(); svg.focus(); });
    query.addEventListener("pointermove", event => { if (query.hasPointerCapture(event.pointerId)) follow(event); });
    svg.addEventListener("keydown", event => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const size = event.shiftKey ? 0.2 : 0.05;
      move(state.q[0] + size * step[0], state.q[1] + size * step[1]);
    });
    slider.addEventListener("input", () => { state.scale = Number(slider.value); draw(); });
    draw();
  }

  const startAll = () => document.querySelectorAll(".softmax-widget").forEach(start);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", startAll);
  else startAll();
})(this);

// Charts: a measure of every head by layer, a dot a head and a line through the means.

import { axisBottom, axisLeft } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { line } from "d3-shape";
import { el, svg } from "./element";

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [420, 190, 48, 30];
const TICKS = 16; // layers that are numbered

/**
 * Values of each layer's heads, from the bottom layer to the top; those that are no numbers are left out. A line joins
 * the means of the layers of one kind.
 */
export function byLayer(layers: Float32Array[], kinds: string[], label: string, note: string): HTMLElement {
  const known = layers.map((values) => [...values].filter(Number.isFinite));
  const means = known.map((values) => values.reduce((sum, value) => sum + value, 0) / values.length);
  const x = scaleLinear([-0.5, layers.length - 0.5], [LEFT, WIDTH - 8]);
  const y = scaleLinear([0, Math.max(...known.flat(), 1e-9)], [HEIGHT - BOTTOM, 10]).nice(4);
  const dots = known.flatMap((values, at) =>
    values.map((value) => svg("circle", { cx: x(at), cy: y(value), r: 2.6, class: "dot" })),
  );
  const path = line<number>()
    .x((at) => x(at))
    .y((at) => y(means[at]));
  const lines = [...new Set(kinds)].map((kind) => {
    const own = [...layers.keys()].filter((at) => kinds[at] === kind && Number.isFinite(means[at]));
    return svg("path", { class: "mean", fill: "none", d: path(own) ?? "", "data-kind": kind });
  });
  const under = svg("g", { class: "axis", transform: `translate(0, ${HEIGHT - BOTTOM + 2})` });
  const beside = svg("g", { class: "axis", transform: `translate(${LEFT - 4}, 0)` });
  const numbered = [...layers.keys()].filter((n) => n % Math.ceil(layers.length / TICKS) === 0);
  const across = axisBottom(x).tickValues(numbered).tickFormat(String).tickSize(3).tickSizeOuter(0);
  select(under).call(across as never);
  select(beside).call(axisLeft(y).ticks(4).tickSize(3).tickSizeOuter(0) as never);
  const about = { width: WIDTH, height: HEIGHT, role: "img", "aria-label": `${label} by layer` };
  return el(
    "figure",
    {},
    el("figcaption", {}, `${label}, by layer; a dot is a head${note && `; ${note}`}`),
    svg("svg", about, ...dots, ...lines, under, beside),
  );
}

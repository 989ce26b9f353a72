// Token axes of a map: every token's text where there is room, else the tokens at round numbers.

import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { svg } from "./element";
import { short } from "./glyphs";
import type { Token } from "./marks";

export const GUTTER = { left: 132, top: 104 };
const ROOM = { left: 14, top: 17 }; // pixels a label takes along its axis
const LETTERS = { left: 17, top: 15 };
const EDGE = 28;
const UPRIGHT = 62; // pixels a token from which on labels above the map lie level

export interface Extent {
  /** First and one past the last token on screen, fractions included. */
  from: number;
  to: number;
  /** Where they lie, in pixels. */
  pixels: number;
  /** How many there are in all, and the position of the first. */
  count: number;
  offset: number;
}

export interface Marked {
  hover: number | null;
  chosen: [number, number] | null;
  found: number[];
}

export class Axes {
  readonly element: SVGSVGElement;
  private readonly left = svg("g", { class: "axis left" });
  private readonly top = svg("g", { class: "axis top" });
  private readonly corner = svg(
    "g",
    {},
    svg("text", { class: "axis-title", "text-anchor": "end", x: -14, y: -28 }, "keys →"),
    svg("text", { class: "axis-title", "text-anchor": "end", x: -14, y: -10 }, "queries ↓"),
  );

  constructor() {
    this.element = svg("svg", { class: "axes", "aria-hidden": "true" }, this.left, this.top, this.corner);
  }

  /** Draw both, beside the map where its edge is inside the panel by some pixels. */
  draw(
    rows: Extent,
    cols: Extent,
    inset: [number, number],
    tokens: { left: Token[] | null; top: Token[] | null },
    marked: { rows: Marked; cols: Marked },
  ): void {
    this.side("left", rows, tokens.left, marked.rows);
    this.side("top", cols, tokens.top, marked.cols);
    const [x, y] = [GUTTER.left + inset[0], GUTTER.top + inset[1]];
    this.left.setAttribute("transform", `translate(${x}, ${GUTTER.top})`);
    this.top.setAttribute("transform", `translate(${GUTTER.left}, ${y})`);
    this.corner.setAttribute("transform", `translate(${x}, ${y})`);
  }

  /** Labels that stay keep their elements and only move, which is what panning at full speed takes. */
  private side(side: "left" | "top", extent: Extent, tokens: Token[] | null, marked: Marked): void {
    const { from, to, pixels, count, offset } = extent;
    const scale = scaleLinear([from, to], [0, pixels]);
    const step = roundStep(((to - from) / pixels) * ROOM[side]);
    const ticks = places(from, to, step, count, offset);
    for (const n of [marked.hover, marked.chosen?.[0] ?? null]) {
      if (n !== null && n + 0.5 >= from && n + 0.5 <= to) insert(ticks, n, step);
    }
    const level = side === "left" || pixels / (to - from) >= UPRIGHT; // room for labels that lie level
    if (side === "top" && level && scale(ticks[0] + 0.5) < EDGE) ticks.shift(); // it would run into the corner
    const key = (n: number): string => `${n} ${step > 1} ${level} ${tokens?.[n] !== undefined}`;
    const found = new Set(marked.found);
    const state = (n: number): string => {
      const chosen = marked.chosen && n >= marked.chosen[0] && n <= marked.chosen[1];
      return `tick${n === marked.hover ? " hover" : ""}${chosen ? " chosen" : ""}${found.has(n) ? " found" : ""}`;
    };
    const group = side === "left" ? this.left : this.top;
    select(group)
      .selectAll<SVGGElement, number>("g")
      .data(ticks, function (n) {
        return (this as Element).getAttribute?.("data-key") ?? key(n);
      })
      .join((enter) => enter.append((n) => tick(side, level, step, text(n, tokens, step, side), n + offset, key(n))))
      .attr("class", state)
      .attr("transform", (n) =>
        side === "left" ? `translate(0, ${scale(n + 0.5)})` : `translate(${scale(n + 0.5)}, 0)`,
      );
  }
}

function text(n: number, tokens: Token[] | null, step: number, side: "left" | "top"): string {
  return tokens?.[n] ? short(tokens[n].text, LETTERS[side] - (step > 1 ? 4 : 0)) : "";
}

/** A mark with its label: a token's text, its position where tokens are left out between marks. */
function tick(
  side: "left" | "top",
  level: boolean,
  step: number,
  text: string,
  position: number,
  key: string,
): SVGGElement {
  const mark = step === 1 ? null : svg("line", side === "left" ? { x2: -4 } : { y2: -4 });
  const index =
    step > 1 || !text ? svg("tspan", { class: "index", dx: text ? 5 : null }, position.toLocaleString("en")) : null;
  const place =
    side === "left"
      ? { x: -9, dy: "0.32em", "text-anchor": "end" }
      : level
        ? { y: -9, "text-anchor": "middle" }
        : { transform: "translate(4, -7) rotate(-58)", "text-anchor": "start" };
  return svg("g", { "data-key": key }, mark, svg("text", place, text, index));
}

/** 1, 2, 5, 10, ...: the next round number of tokens. */
export function roundStep(least: number): number {
  if (least <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least)!;
}

/** Tokens on screen whose position is a multiple of the step. */
function places(from: number, to: number, step: number, count: number, offset: number): number[] {
  const first = Math.max(0, Math.floor(from));
  const last = Math.min(count - 1, Math.ceil(to) - 1);
  const found: number[] = [];
  for (let n = Math.ceil((first + offset) / step) * step - offset; n <= last; n += step) {
    if (n + 0.5 >= from && n + 0.5 <= to) found.push(n);
  }
  return found;
}

/** Make room for one more tick: its neighbours give way. */
function insert(ticks: number[], n: number, step: number): void {
  for (let at = ticks.length - 1; at >= 0; at--) if (Math.abs(ticks[at] - n) < step) ticks.splice(at, 1);
  ticks.push(n);
}

// The legend: what a colour, or the strength of a line, means, drawn to the scale of the picture beside it.

import { axisBottom } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { type Ramp, valueAt } from "./colours";
import { el, svg } from "./element";

const WIDTH = 220;
const HEIGHT = 8;
const MARGIN = 34;
const STOPS = [0, 0.25, 0.5, 0.75, 1];

export class Legend {
  readonly element: HTMLElement;
  private readonly bar: HTMLCanvasElement;
  private readonly axis = svg("g", { class: "axis", transform: `translate(${MARGIN}, 0)` });
  private readonly label = el("span", { class: "legend-label" });

  constructor(private readonly width = WIDTH) {
    this.bar = el("canvas", { width, height: 1 });
    this.bar.style.width = `${width}px`;
    this.bar.style.height = `${HEIGHT}px`;
    const ticks = svg("svg", { width: width + 2 * MARGIN, height: 20, "aria-hidden": "true" }, this.axis);
    this.element = el("div", { class: "legend" }, this.label, el("div", {}, this.bar, ticks));
  }

  /** Draw the scale; `clipped` if larger values than its end are drawn as its end. */
  draw(ramp: Ramp, label: string, clipped: boolean): void {
    const stops = ramp.signed ? [-1, -0.5, 0, 0.5, 1] : STOPS;
    const value = (stop: number): number => {
      const least = stop === 0 && !(ramp.scale === "log" && !ramp.signed);
      return least ? 0 : Math.sign(stop || 1) * valueAt(Math.abs(stop), ramp.scale) * ramp.most;
    };
    this.paint(label, (place) => {
      const share = ramp.signed ? 2 * place - 1 : place;
      return ramp.css(Math.sign(share) * valueAt(Math.abs(share), ramp.scale) * ramp.most);
    });
    this.ticks(stops, (stop) => {
      const sign = !clipped || Math.abs(stop) < 1 ? "" : stop < 0 ? "≤ " : "≥ ";
      return sign + brief(value(stop));
    });
  }

  /** Draw the scale of maps of which each ends at its own strongest value. */
  each(ramp: Ramp, label: string, strongest: string): void {
    this.paint(label, (place) => ramp.css(valueAt(place, ramp.scale) * ramp.most));
    this.ticks([0, 1], (stop) => (stop ? strongest : "0"));
  }

  /** Draw the scale of lines, which fade towards a weight of 0; `most` is the strongest, or words for it. */
  lines(most: number | string, label: string): void {
    const ink = getComputedStyle(document.body).color;
    this.paint(label, (place) => `color-mix(in srgb, ${ink} ${100 * place}%, transparent)`);
    if (typeof most === "string") this.ticks([0, 1], (stop) => (stop ? most : "0"));
    else this.ticks(STOPS, (stop) => brief(stop * most));
  }

  private paint(label: string, colour: (place: number) => string): void {
    this.label.textContent = label;
    const context = this.bar.getContext("2d")!;
    context.clearRect(0, 0, this.width, 1);
    for (let x = 0; x < this.width; x++) {
      context.fillStyle = colour(x / (this.width - 1));
      context.fillRect(x, 0, 1, 1);
    }
  }

  private ticks(stops: number[], text: (stop: number) => string): void {
    const axis = axisBottom(scaleLinear([stops[0], 1], [0, this.width]))
      .tickValues(stops)
      .tickSize(3)
      .tickPadding(2)
      .tickFormat((stop) => text(Number(stop)));
    select(this.axis).call(axis as never);
  }
}

/** What a mark beside the colours means: a small sample of it, and its words. */
export function mark(name: string, words: string): HTMLElement {
  return el("span", { class: "mark" }, el("i", { class: `mark-${name}` }), words);
}

/** A number in few characters. */
export function brief(value: number): string {
  const size = Math.abs(value);
  if (size === 0) return "0";
  return (size < 0.001 ? value.toExponential(0) : String(+value.toPrecision(2))).replaceAll("-", "−");
}

/** A weight to so many digits. */
export function number(value: number | null, digits = 4): string {
  if (value === null) return "…";
  const small = value !== 0 && Math.abs(value) < 1e-3;
  return (small ? value.toExponential(digits - 1) : String(+value.toPrecision(digits))).replaceAll("-", "−");
}

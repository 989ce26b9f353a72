// The legend: what a colour means, drawn to the same scale as the map.

import { axisBottom } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { type Ramp, valueAt } from "./colours";
import { el, svg } from "./element";

const WIDTH = 220;
const HEIGHT = 8;
const MARGIN = 34;

export class Legend {
  readonly element: HTMLElement;
  private readonly bar = el("canvas", { width: WIDTH, height: 1 });
  private readonly axis = svg("g", { class: "axis", transform: `translate(${MARGIN}, 0)` });
  private readonly label = el("span", { class: "legend-label" });

  constructor() {
    const ticks = svg("svg", { width: WIDTH + 2 * MARGIN, height: 20, "aria-hidden": "true" }, this.axis);
    this.element = el("div", { class: "legend" }, this.label, el("div", {}, this.bar, ticks));
  }

  /** Draw the scale; `clipped` if larger values than its end are drawn as its end. */
  draw(ramp: Ramp, label: string, clipped: boolean): void {
    this.label.textContent = label;
    const context = this.bar.getContext("2d")!;
    for (let x = 0; x < WIDTH; x++) {
      const place = x / (WIDTH - 1);
      const share = ramp.signed ? 2 * place - 1 : place;
      context.fillStyle = ramp.css(Math.sign(share) * valueAt(Math.abs(share), ramp.scale) * ramp.most);
      context.fillRect(x, 0, 1, 1);
    }
    this.bar.style.height = `${HEIGHT}px`;
    const stops = ramp.signed ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
    const value = (stop: number): number => {
      const least = stop === 0 && !(ramp.scale === "log" && !ramp.signed);
      return least ? 0 : Math.sign(stop || 1) * valueAt(Math.abs(stop), ramp.scale) * ramp.most;
    };
    const place = scaleLinear([ramp.signed ? -1 : 0, 1], [0, WIDTH]);
    const axis = axisBottom(place)
      .tickValues(stops)
      .tickSize(3)
      .tickPadding(2)
      .tickFormat((stop) => {
        const sign = !clipped || Math.abs(Number(stop)) < 1 ? "" : Number(stop) < 0 ? "≤ " : "≥ ";
        return sign + brief(value(Number(stop)));
      });
    select(this.axis).call(axis as never);
  }
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

// Thumbnail: a head as a button with its small map, which is drawn only while it is near the screen.

import { type App, headName } from "./app";
import { type Certainty, said } from "./certainty";
import { Spread } from "./colours";
import { el, fill } from "./element";
import { brief } from "./legend";

/** A head: its measures, and how to decode its map. */
export interface HeadMap {
  layer: number;
  head: number;
  entropy: number;
  distance: number;
  max: number;
  sink: number;
  /** Mean size of the difference of the two captures, cell by cell; not a number where they are not compared. */
  difference: number;
  cells: () => Float32Array;
  size: [rows: number, cols: number];
  signed: boolean;
  certainty: Certainty;
}

const STRONG = 0.995; // share of a map's cells that are weaker than its strongest colour

export class Thumbnail {
  readonly element: HTMLButtonElement;
  private drawn = "";
  private strong: number | null = null;

  constructor(
    private readonly app: App,
    readonly map: HeadMap,
    private readonly name: string,
    open: () => void,
  ) {
    const layer = app.capture.layers[map.layer];
    const sampled = map.certainty.state !== "exact" && said(map.certainty);
    const about = [`${layer.name}, ${headName(layer, map.head)}: ${facts(map)}`, sampled].filter(Boolean).join(", ");
    this.element = el("button", {
      type: "button",
      class: "head",
      "aria-label": about,
      title: about,
      "data-layer": map.layer,
      "data-head": map.head,
      onclick: open,
    });
  }

  /** Draw the map; `most` is the value of the strongest colour, null for a strong one of this map. */
  draw(most: number | null): void {
    const { palette, scale } = this.app.state;
    const key = `${palette} ${this.app.theme} ${scale} ${most}`;
    if (this.drawn === key) return;
    if (!this.drawn) this.build();
    this.drawn = key;
    const cells = this.map.cells();
    this.strong ??= strongest(cells);
    const ramp = this.app.ramp(most ?? this.strong, this.map.signed);
    this.element.querySelector("canvas")!.getContext("2d")!.putImageData(ramp.pixels(cells, ...this.map.size), 0, 0);
  }

  /** Let go of all but the button itself, which keeps its place. */
  clear(): void {
    this.drawn = "";
    fill(this.element);
  }

  private build(): void {
    const { layer, head, entropy, size, sink, certainty } = this.map;
    const { heads, n_j } = this.app.capture.layers[layer];
    const bar = el("span", { class: "entropy" }, el("i"));
    const share = (entropy || 0) / Math.log(Math.max(2, n_j));
    (bar.firstChild as HTMLElement).style.width = `${Math.min(100, 100 * share)}%`;
    const mark = sink > 0 ? el("span", { class: "sink" }) : null;
    if (mark) mark.style.opacity = String(0.35 + 0.65 * sink);
    const canvas = el("canvas", { width: size[1], height: size[0] });
    const thumb = `thumb${certainty.state === "exact" ? "" : " sampled"}`;
    fill(
      this.element,
      el("span", { class: thumb }, canvas, ...this.padding(), mark),
      bar,
      el("span", { class: "name" }, `${this.name} · ${heads[head]}`),
    );
  }

  /** Hatching over what a batch was padded with. */
  private padding(): HTMLElement[] {
    const { padding, n_i, n_j } = this.app.capture.layers[this.map.layer];
    const [rows, cols] = padding?.[this.app.state.batch] ?? [[], []];
    const part = (top: number, left: number, high: number, wide: number): HTMLElement => {
      const hatch = el("span", { class: "padding" });
      const place = { top, left, height: high, width: wide };
      for (const [name, share] of Object.entries(place)) hatch.style.setProperty(name, `${100 * share}%`);
      return hatch;
    };
    return [
      ...rows.map(([first, last]) => part(first / n_i, 0, (last + 1 - first) / n_i, 1)),
      ...cols.map(([first, last]) => part(0, first / n_j, 1, (last + 1 - first) / n_j)),
    ];
  }
}

function strongest(cells: Float32Array): number {
  const spread = new Spread();
  spread.add(cells);
  return spread.quantile(STRONG) ?? 1;
}

/** What is known of a head, in words. */
function facts({ entropy, distance, max, sink, difference }: HeadMap): string {
  const known: [string, number, number][] = [
    ["entropy", entropy, 2],
    ["distance", distance, 1],
    ["mean largest weight", max, 2],
  ];
  const parts = known
    .filter(([, value]) => Number.isFinite(value))
    .map(([name, value, digits]) => `${name} ${value.toFixed(digits)}`);
  if (Number.isFinite(difference)) parts.push(`difference ${brief(difference)}`);
  return [...parts, ...(sink > 0 ? [`sink ${Math.round(100 * sink)} %`] : [])].join(", ");
}

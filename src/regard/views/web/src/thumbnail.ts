// Thumbnail: a head as a button. Its small map is drawn only while it is near the screen, on the sheet behind the buttons.

import { type App, headName } from "./app";
import { type Atlas, badge, scored } from "./atlas";
import { type Certainty, said } from "./certainty";
import { Spread } from "./colours";
import { el, fill } from "./element";
import { brief } from "./legend";
import type { Placed } from "./sheet";
import type { Layer } from "./source";

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
  /** The last of the numbers that the user gave the head; not a number without one. */
  effect: number;
  /** The size of the effect, as a share of the largest one. */
  effectShare: () => number;
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
  private shown: string | null = null;
  private picture: HTMLCanvasElement | null = null;

  constructor(
    private readonly app: App,
    readonly map: HeadMap,
    private readonly name: string,
    private readonly atlas: Atlas,
    open: () => void,
  ) {
    this.element = el("button", {
      type: "button",
      class: "head",
      "data-layer": map.layer,
      "data-head": map.head,
      onclick: open,
    });
    this.describe();
  }

  /** Say what is known of the head, with its roles as far as they are known. */
  describe(): void {
    const { layer: number, head, certainty } = this.map;
    const layer = this.app.capture.layers[number];
    const roles = this.atlas.of(number, head);
    const parts = [
      `${layer.name}, ${headName(layer, head)}: ${facts(this.map)}`,
      ...effects(layer, head),
      ...(roles.length ? [`roles: ${roles.map((role) => scored(role, this.atlas.score(number, head, role))).join(", ")}`] : []),
      ...(certainty.state === "exact" ? [] : [said(certainty)]),
    ];
    const about = parts.filter(Boolean).join(", ");
    this.element.setAttribute("aria-label", about);
    this.element.title = about;
    if (roles.length) this.element.dataset["role"] = roles[0];
    else delete this.element.dataset["role"];
    this.element.querySelector(".badges")?.replaceChildren(...this.badges());
  }

  /** Write a number behind the name, null for none. */
  write(number: string | null): void {
    this.shown = number;
    const value = this.element.querySelector(".name b");
    if (value) value.textContent = number ?? "";
  }

  /** Marks of the roles; that of a sink is its ring. */
  private badges(): HTMLElement[] {
    const { layer, head } = this.map;
    return this.atlas.of(layer, head).filter((role) => role !== "sink").map(badge);
  }

  /** Draw the map for the sheet; `most` is the value of the strongest colour, null for a strong one of this map. */
  draw(most: number | null): void {
    const { palette, scale } = this.app.state;
    const key = `${palette} ${this.app.theme} ${scale} ${most}`;
    if (this.drawn === key) return;
    if (!this.drawn) this.build();
    this.drawn = key;
    const cells = this.map.cells();
    this.strong ??= strongest(cells);
    const ramp = this.app.ramp(most ?? this.strong, this.map.signed);
    const [rows, cols] = this.map.size;
    this.picture ??= el("canvas", { width: cols, height: rows });
    this.picture.getContext("2d")!.putImageData(ramp.pixels(cells, rows, cols), 0, 0);
  }

  /** The map and where the button shows it, null until it is drawn. */
  placed(): Placed | null {
    const [row, place] = [this.element.closest(".layer, .ranked, .island"), this.element.firstElementChild];
    return row && place && this.picture ? { row, place, picture: this.picture } : null;
  }

  /** Let go of all but the button itself, which keeps its place. */
  clear(): void {
    this.drawn = "";
    this.picture = null;
    fill(this.element);
  }

  private build(): void {
    const { layer, head, entropy, sink, certainty, effect, effectShare } = this.map;
    const { heads, n_j } = this.app.capture.layers[layer];
    const bar = meter("entropy", (entropy || 0) / Math.log(Math.max(2, n_j)));
    const mark = sink > 0 ? el("span", { class: "sink" }) : null;
    if (mark) mark.style.opacity = String(0.35 + 0.65 * sink);
    const thumb = `thumb${certainty.state === "exact" ? "" : " sampled"}`;
    fill(
      this.element,
      el("span", { class: thumb }, ...this.padding(), mark, el("span", { class: "badges" }, ...this.badges())),
      bar,
      Number.isFinite(effect) ? meter("effect", effectShare()) : null,
      el("span", { class: "name" }, `${this.name} · ${heads[head]} `, el("b", {}, this.shown ?? "")),
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

/** A bar that is full at a share of 1. */
function meter(name: string, share: number): HTMLElement {
  const bar = el("i");
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  return el("span", { class: name }, bar);
}

/** What the user measured of a head, in words. */
function effects(layer: Layer, head: number): string[] {
  const known = Object.entries(layer.effects).map(([name, values]): [string, number | null] => [name, values[head]]);
  return known.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${brief(value!)}`);
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

// Overview: every head of every layer as a small map, with its entropy and a mark where it has a sink.

import { type App, headName, isEmpty, layerNames, type View, words } from "./app";
import { type Certainty, COLUMNS, fields, said, together } from "./certainty";
import { Spread } from "./colours";
import { menu, notice } from "./controls";
import { el, fill } from "./element";
import { brief, Legend } from "./legend";
import { pause } from "./remote";
import { several } from "./several";
import { type Difference, type Layer, type Overview, Refusal } from "./source";
import type { Sort, State } from "./state";

/** A head with its measures. */
interface Item {
  layer: number;
  head: number;
  entropy: number;
  distance: number;
  max: number;
  sink: number;
  /** Mean size of the difference of the two captures, cell by cell; not a number where they are not compared. */
  difference: number;
  thumb: Float32Array;
  size: [number, number];
  signed: boolean;
  certainty: Certainty;
}

const MEASURES = { layer: "by layer", entropy: "entropy", distance: "distance", max: "largest weight", sink: "sink" };

export class OverviewView implements View {
  readonly keys: Record<string, () => void> = {
    ArrowLeft: () => this.step(-1, 0),
    ArrowRight: () => this.step(1, 0),
    ArrowUp: () => this.step(0, -1),
    ArrowDown: () => this.step(0, 1),
  };
  private readonly body = el("div", { class: "overview", role: "region", "aria-label": "heads" });
  private readonly filter: HTMLInputElement;
  private readonly names: string[];
  private readonly watch = new ResizeObserver(() => this.fit());
  private readonly legend = new Legend();
  private items: Item[] = [];
  /** Queries and keys of a cell that differences are means of. */
  private cellSize: [number, number] = [1, 1];
  /** The value drawn strongest in differences. */
  private most = 1;
  private asked = "";
  private pending = 0;

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    this.names = layerNames(app.capture.layers);
    this.filter = el("input", {
      type: "search",
      placeholder: "name, sink>0.3, entropy<1",
      "aria-label": "filter",
      "data-control": "filter",
      spellcheck: "false",
      oninput: () => app.go({ filter: this.filter.value }, "slide"),
    });
    fill(host, this.body);
    this.watch.observe(this.body);
  }

  update(state: State): void {
    if (this.filter.value !== state.filter) this.filter.value = state.filter;
    const key = `${state.capture} ${state.batch} ${state.against === "capture"}`;
    if (key !== this.asked) void this.load(key);
    else this.draw();
  }

  close(): void {
    this.asked = "";
    cancelAnimationFrame(this.pending);
    this.watch.disconnect();
  }

  tools(): Node[] {
    const { state } = this.app;
    const offered = state.against === "capture" ? { ...MEASURES, difference: "difference A − B" } : MEASURES;
    return [menu<Sort>("sort", offered, state.sort, (sort) => this.app.go({ sort })), this.filter];
  }

  table(): string[][] {
    const compared = this.app.state.against === "capture";
    const named = ["entropy", "distance", "mean largest weight", "sink", ...(compared ? ["difference A − B"] : [])];
    const rows = [["layer", "head", ...named, ...COLUMNS]];
    for (const item of this.chosen()) {
      const { name, heads } = this.app.capture.layers[item.layer];
      const numbers = [item.entropy, item.distance, item.max, item.sink, ...(compared ? [item.difference] : [])];
      rows.push([name, String(heads[item.head]), ...numbers.map(String), ...fields({ ...item.certainty, error: 0 })]);
    }
    return rows;
  }

  private async load(key: string): Promise<void> {
    this.asked = key;
    this.items = [];
    const { layers } = this.app.capture;
    const { batch, capture } = this.app.state;
    const wanted = [...layers.keys()].filter((layer) => batch < layers[layer].batch && !isEmpty(layers[layer]));
    fill(this.body, notice(wanted.length ? "reading the heads …" : "No layer has anything to show."));
    const work = async (layer: number): Promise<void> => {
      const [one, less] = await Promise.all([this.app.source.overview({ capture, layer, batch }), this.less(layer)]);
      if (key !== this.asked) return;
      if (less) this.cellSize = less.cell;
      this.items = [...this.items.filter((item) => item.layer !== layer), ...items(layer, one, less)];
      this.items.sort((a, b) => a.layer - b.layer || a.head - b.head);
      this.pending ||= requestAnimationFrame(() => this.draw());
    };
    /** Ask for a layer again until all of its queries are measured. */
    const improve = async (layer: number): Promise<void> => {
      for (;;) {
        const retry = this.items.find((item) => item.layer === layer)?.certainty.retry ?? null;
        if (key !== this.asked || retry === null) return;
        await pause(retry);
        if (key === this.asked) await work(layer);
      }
    };
    try {
      await several(wanted, work, () => key === this.asked);
      await several(wanted, improve, () => key === this.asked);
    } catch (error) {
      if (key === this.asked) this.body.prepend(notice(words(error) ?? ""));
    }
  }

  /** The layer less its counterpart; null where it has none, or a difference would take too long. */
  private async less(layer: number): Promise<Difference | null> {
    const { capture, batch, against } = this.app.state;
    const found = against === "capture" ? this.app.counterpart(layer) : null;
    const other = { capture: 1 - capture, layer: found ?? 0, batch };
    if (found === null || batch >= this.app.session.captures[other.capture].layers[found].batch) return null;
    try {
      return await this.app.source.difference({ capture, layer, batch }, other);
    } catch (error) {
      if (error instanceof Refusal) return null;
      throw error;
    }
  }

  private chosen(): Item[] {
    const { sort, filter } = this.app.state;
    const found = this.items.filter((item) =>
      passes(item, filter, this.app.capture.layers[item.layer], this.names[item.layer]),
    );
    return sort === "layer" ? found : found.sort((a, b) => (b[sort] || 0) - (a[sort] || 0));
  }

  private draw(): void {
    this.pending = 0;
    const chosen = this.chosen();
    const { layers } = this.app.capture;
    this.most = spreadOf(chosen.filter(({ signed }) => signed));
    if (this.app.state.sort !== "layer") {
      const cells = chosen.map((item) =>
        this.cell(item, `${this.names[item.layer]} · ${layers[item.layer].heads[item.head]}`),
      );
      fill(this.body, el("div", { class: "heads flat" }, ...cells));
    } else {
      const rows = [...new Set(chosen.map(({ layer }) => layer))].map((layer) => {
        const cells = chosen.filter((item) => item.layer === layer).map((item) => this.cell(item, null));
        return el(
          "section",
          { class: "layer" },
          el("h3", { title: layers[layer].name }, this.names[layer]),
          el("div", { class: "heads" }, ...cells),
        );
      });
      const widest = Math.max(0, ...chosen.map(({ head }) => head + 1));
      const numbers = layers[chosen[0]?.layer ?? 0].heads.slice(0, widest);
      const ruler = el(
        "section",
        { class: "layer ruler", "aria-hidden": "true" },
        el("h3"),
        el("div", { class: "heads" }, ...numbers.map((head) => el("span", {}, head))),
      );
      fill(this.body, ruler, ...rows);
    }
    if (!chosen.length && this.items.length) this.body.append(notice("No head passes the filter."));
    const key = el(
      "p",
      { class: "hint key" },
      el("span", { class: "entropy" }, el("i")),
      "entropy, full where attention is uniform",
      el("span", { class: "sink" }),
      "attention sink, stronger the more it draws",
    );
    this.body.append(key, ...this.notes(chosen));
    this.fit();
  }

  /** The scale of the maps, and how far they can be trusted. */
  private notes(chosen: Item[]): Node[] {
    const own = chosen.some(({ signed }) => !signed) ? "each map is drawn to its own scale" : "";
    const sampled = chosen.filter(({ certainty }) => certainty.state !== "exact");
    const known = sampled.length ? `hatched: ${said(together(sampled.map(({ certainty }) => certainty)))}` : "";
    const text = [own, known].filter(Boolean).join("; ");
    const notes: Node[] = text ? [el("p", { class: "hint known" }, text)] : [];
    if (!chosen.some(({ signed }) => signed)) return notes;
    const [rows, cols] = this.cellSize;
    this.legend.draw(this.app.ramp(this.most, true), "mean of each cell, A − B; one scale for all heads", true);
    const pooled = `the difference of a head is the mean size of A − B over cells of ${rows} × ${cols} weights`;
    return [...notes, this.legend.element, ...(rows * cols > 1 ? [el("p", { class: "hint" }, pooled)] : [])];
  }

  private cell(item: Item, caption: string | null): HTMLElement {
    const { layers } = this.app.capture;
    const layer = layers[item.layer];
    const canvas = el("canvas", { width: item.size[1], height: item.size[0] });
    const ramp = this.app.ramp(item.signed ? this.most : spreadOf([item]), item.signed);
    canvas.getContext("2d")!.putImageData(ramp.pixels(item.thumb, ...item.size), 0, 0);
    const share = (item.entropy || 0) / Math.log(Math.max(2, layer.n_j));
    const bar = el("span", { class: "entropy" }, el("i"));
    (bar.firstChild as HTMLElement).style.width = `${Math.min(100, 100 * share)}%`;
    const sink = item.sink > 0 ? el("span", { class: "sink" }) : null;
    if (sink) sink.style.opacity = String(0.35 + 0.65 * item.sink);
    const sampled = item.certainty.state !== "exact";
    const about = [`${layer.name}, ${headName(layer, item.head)}: ${facts(item)}`, sampled && said(item.certainty)]
      .filter(Boolean)
      .join(", ");
    const open = (): void => this.app.go({ view: "map", layer: item.layer, head: item.head, at: null });
    const current = item.layer === this.app.state.layer && item.head === this.app.state.head;
    return el(
      "button",
      {
        type: "button",
        class: `head${current ? " current" : ""}`,
        "aria-label": about,
        title: about,
        "data-layer": item.layer,
        "data-head": item.head,
        onclick: open,
      },
      el("span", { class: `thumb${sampled ? " sampled" : ""}` }, canvas, ...this.padding(item), sink),
      bar,
      caption === null ? null : el("span", { class: "name" }, caption),
    );
  }

  /** Hatching over what a batch was padded with. */
  private padding({ layer }: Item): HTMLElement[] {
    const { padding, n_i, n_j } = this.app.capture.layers[layer];
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

  /** Thumbnails as large as the page has room for. */
  private fit(): void {
    const heads = Math.max(1, ...this.app.capture.layers.map((layer) => layer.heads.length));
    const rows = new Set(this.items.map(({ layer }) => layer)).size || 1;
    const [wide, high] = [(this.body.clientWidth - 160) / heads - 10, (window.innerHeight - 200) / rows - 20];
    this.body.style.setProperty("--cell", `${Math.floor(Math.max(44, Math.min(wide, Math.max(high, 76), 132)))}px`);
  }

  /** Move the focus through the grid by where things are on screen. */
  private step(right: number, down: number): void {
    const buttons = [...this.body.querySelectorAll<HTMLElement>("button.head")];
    const active = buttons.find((one) => one === document.activeElement);
    if (!active) return (this.body.querySelector<HTMLElement>("button.head.current") ?? buttons[0])?.focus();
    if (right) return buttons[buttons.indexOf(active) + right]?.focus();
    const here = active.getBoundingClientRect();
    const beyond = buttons.filter((one) => (one.getBoundingClientRect().top - here.top) * down > 4);
    const away = (one: HTMLElement): number => {
      const box = one.getBoundingClientRect();
      return Math.abs(box.top - here.top) * 4 + Math.abs(box.left - here.left);
    };
    beyond.sort((a, b) => away(a) - away(b))[0]?.focus();
  }
}

/** What is known of a head, in words. */
function facts({ entropy, distance, max, sink, difference }: Item): string {
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

function items(layer: number, one: Overview, less: Difference | null): Item[] {
  const { state, error, retry, of } = one;
  return [...one.entropy.keys()].map((head) => {
    const signed = less !== null && head < less.difference.length;
    const { thumbs, size } = signed ? less : one;
    const count = size[0] * size[1];
    const thumb = thumbs.subarray(head * count, (head + 1) * count);
    const difference = signed ? less.difference[head] : NaN;
    const [entropy, distance, max, sink] = [one.entropy[head], one.distance[head], one.max[head], one.sink[head]];
    const certainty = { state, error, retry, of };
    return { layer, head, entropy, distance, max, sink, difference, thumb, size, signed, certainty };
  });
}

/** A strong value of some maps, under which all but a few of their cells lie. */
function spreadOf(items: Item[]): number {
  const spread = new Spread();
  for (const { thumb } of items) spread.add(thumb);
  return spread.quantile(0.995) ?? 1;
}

/** Whether a head passes every word of a filter: `entropy<1`, `sink>0.3`, or a part of its layer's name. */
function passes(item: Item, filter: string, layer: Layer, name: string): boolean {
  return filter
    .toLowerCase()
    .split(/[\s,]+/)
    .filter(Boolean)
    .every((word) => {
      const parts = /^(entropy|distance|max|sink|difference|head)([<>])(\d*\.?\d+)$/.exec(word);
      if (!parts) return layer.name.toLowerCase().includes(word) || name.toLowerCase().includes(word);
      const value = parts[1] === "head" ? layer.heads[item.head] : item[parts[1] as Exclude<Sort, "layer">];
      return parts[2] === "<" ? value < Number(parts[3]) : value > Number(parts[3]);
    });
}

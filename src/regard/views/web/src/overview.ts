// Overview: every head of every layer as a small map, with its entropy and a mark where it has a sink.

import { type App, isEmpty, layerNames, type View, words } from "./app";
import { COLUMNS, fields, said, together } from "./certainty";
import { Spread } from "./colours";
import { menu, notice } from "./controls";
import { arrange, el, fill } from "./element";
import * as hiding from "./hiding";
import { Legend } from "./legend";
import { pause } from "./remote";
import { several } from "./several";
import { type Difference, type Layer, type Overview, Refusal } from "./source";
import type { Sort, State } from "./state";
import { type HeadMap, Thumbnail } from "./thumbnail";

const STRONG = 0.995; // share of all cells that are weaker than the strongest colour of differences
const MEASURES = { layer: "by layer", entropy: "entropy", distance: "distance", max: "largest weight", sink: "sink" };

export class OverviewView implements View {
  readonly keys: Record<string, () => void> = {
    ArrowLeft: () => this.step(-1, 0),
    ArrowRight: () => this.step(1, 0),
    ArrowUp: () => this.step(0, -1),
    ArrowDown: () => this.step(0, 1),
  };
  private readonly grid = el("div");
  private readonly notes = el("div");
  private readonly body = el(
    "div",
    { class: "overview", role: "region", "aria-label": "heads" },
    this.grid,
    this.notes,
  );
  private readonly filter: HTMLInputElement;
  private readonly names: string[];
  private readonly resized = new ResizeObserver(() => this.fit());
  /** Tells which heads come near the screen, and which leave it. */
  private readonly seen: IntersectionObserver;
  private readonly near = new Set<Thumbnail>();
  private readonly legend = new Legend();
  /** The heads of each layer that has been read. */
  private readonly found = new Map<number, Thumbnail[]>();
  private readonly rows = new Map<number, HTMLElement>();
  private readonly flat = el("div", { class: "heads flat" });
  private readonly thumbnails = new WeakMap<Element, Thumbnail>();
  /** The layers that have heads to show. */
  private wanted: number[] = [];
  private current: Thumbnail | null = null;
  /** Queries and keys of a cell that differences are means of. */
  private cellSize: [number, number] = [1, 1];
  /** The values of all differences, which have one scale. */
  private differences = new Spread();
  private asked = "";
  private pending = 0;

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    this.seen = new IntersectionObserver((changes) => this.follow(changes), { root: host, rootMargin: "50%" });
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
    this.resized.observe(this.body);
  }

  update(state: State): void {
    if (this.filter.value !== state.filter) this.filter.value = state.filter;
    const key = `${state.capture} ${state.batch} ${state.against === "capture"} ${state.hide}`;
    if (key !== this.asked) void this.load(key);
    else this.draw();
  }

  close(): void {
    this.asked = "";
    cancelAnimationFrame(this.pending);
    this.resized.disconnect();
    this.seen.disconnect();
  }

  tools(): Node[] {
    const { state } = this.app;
    const offered = state.against === "capture" ? { ...MEASURES, difference: "difference A − B" } : MEASURES;
    return [menu<Sort>("sort", offered, state.sort, (sort) => this.app.go({ sort })), this.filter, ...(this.app.session.live ? [hiding.tools(this.app)] : [])];
  }

  table(): string[][] {
    const compared = this.app.state.against === "capture";
    const named = ["entropy", "distance", "mean largest weight", "sink", ...(compared ? ["difference A − B"] : [])];
    const rows = [["layer", "head", ...named, ...COLUMNS]];
    for (const { map } of this.chosen()) {
      const { name, heads } = this.app.capture.layers[map.layer];
      const numbers = [map.entropy, map.distance, map.max, map.sink, ...(compared ? [map.difference] : [])];
      rows.push([name, String(heads[map.head]), ...numbers.map(String), ...fields({ ...map.certainty, error: 0 })]);
    }
    return rows;
  }

  private async load(key: string): Promise<void> {
    this.asked = key;
    this.forget();
    const { layers } = this.app.capture;
    const { batch } = this.app.state;
    this.wanted = [...layers.keys()].filter((layer) => batch < layers[layer].batch && !isEmpty(layers[layer]));
    fill(this.grid, notice(this.wanted.length ? "reading the heads …" : "No layer has anything to show."));
    fill(this.notes);
    const work = async (layer: number): Promise<void> => {
      const [one, less] = await Promise.all([this.app.source.overview(this.app.placeOf(layer)), this.less(layer)]);
      if (key !== this.asked) return;
      if (less && !this.found.has(layer)) this.differences.add(less.thumbs.values());
      if (less) this.cellSize = less.cell;
      this.show(layer, maps(layer, one, less));
      this.pending ||= requestAnimationFrame(() => this.draw());
    };
    /** Ask for a layer again until all of its queries are measured. */
    const improve = async (layer: number): Promise<void> => {
      for (;;) {
        const retry = this.found.get(layer)?.[0]?.map.certainty.retry ?? null;
        if (key !== this.asked || retry === null) return;
        await pause(retry);
        if (key === this.asked) await work(layer);
      }
    };
    try {
      await several(this.wanted, work, () => key === this.asked);
      await several(this.wanted, improve, () => key === this.asked);
    } catch (error) {
      if (key === this.asked) this.body.prepend(notice(words(error) ?? ""));
    }
  }

  /** Let go of all heads. */
  private forget(): void {
    this.seen.disconnect();
    this.near.clear();
    this.found.clear();
    this.rows.clear();
    fill(this.flat);
    this.differences = new Spread();
    fill(this.body, this.grid, this.notes);
  }

  /** Take the heads of a layer, in place of those that were there. */
  private show(layer: number, maps: HeadMap[]): void {
    for (const old of this.found.get(layer) ?? []) {
      this.seen.unobserve(old.element);
      this.near.delete(old);
      old.element.remove();
    }
    const open = (head: number) => (): void => this.app.go({ view: "map", layer, head, at: null });
    const made = maps.map((map) => new Thumbnail(this.app, map, this.names[layer], open(map.head)));
    for (const one of made) {
      this.thumbnails.set(one.element, one);
      this.seen.observe(one.element);
    }
    this.found.set(layer, made);
  }

  /** The layer less its counterpart; null where it has none, or a difference would take too long. */
  private async less(layer: number): Promise<Difference | null> {
    const { capture, batch, against } = this.app.state;
    const found = against === "capture" ? this.app.counterpart(layer) : null;
    const place = this.app.placeOf(layer);
    const other = { ...place, capture: 1 - capture, layer: found ?? 0 };
    if (found === null) return null;
    const [one, two] = [this.app.capture.layers[layer], this.app.session.captures[other.capture].layers[found]];
    if (batch >= two.batch || one.n_i !== two.n_i || one.n_j !== two.n_j) return null;
    try {
      return await this.app.source.difference(place, other);
    } catch (error) {
      if (error instanceof Refusal) return null;
      throw error;
    }
  }

  private chosen(): Thumbnail[] {
    const { sort, filter } = this.app.state;
    const { layers } = this.app.capture;
    const heads = this.wanted.flatMap((layer) => this.found.get(layer) ?? []);
    const found = heads.filter(({ map }) => passes(map, filter, layers[map.layer], this.names[map.layer]));
    return sort === "layer" ? found : found.sort((a, b) => (b.map[sort] || 0) - (a.map[sort] || 0));
  }

  /** Bring the page up to the state; heads that are there already stay where they are. */
  private draw(): void {
    this.pending = 0;
    if (!this.found.size) return;
    const chosen = this.chosen();
    if (this.app.state.sort === "layer") {
      const rows = this.wanted.flatMap((layer) => this.row(layer, chosen) ?? []);
      arrange(this.grid, [this.ruler(chosen), ...rows]);
    } else {
      arrange(this.flat, chosen.map(({ element }) => element));
      arrange(this.grid, [this.flat]);
    }
    if (!chosen.length) this.grid.append(notice("No head passes the filter."));
    this.mark();
    this.paint();
    const key = el(
      "p",
      { class: "hint key" },
      el("span", { class: "entropy" }, el("i")),
      "entropy, full where attention is uniform",
      el("span", { class: "sink" }),
      "attention sink, stronger the more it draws",
    );
    fill(this.notes, key, ...this.remarks(chosen.map(({ map }) => map)));
    this.fit();
  }

  /** The heads of a layer behind its name; null if none of them is chosen. */
  private row(layer: number, chosen: Thumbnail[]): HTMLElement | null {
    const heads = chosen.filter(({ map }) => map.layer === layer).map(({ element }) => element);
    if (!heads.length) return null;
    let row = this.rows.get(layer);
    if (!row) {
      const name = el("h3", { title: this.app.capture.layers[layer].name }, this.names[layer]);
      row = el("section", { class: "layer" }, name, el("div", { class: "heads" }));
      this.rows.set(layer, row);
    }
    arrange(row.lastElementChild!, heads);
    return row;
  }

  /** The numbers of the heads above their columns. */
  private ruler(chosen: Thumbnail[]): HTMLElement {
    const { layers } = this.app.capture;
    const widest = chosen.reduce((most, { map }) => Math.max(most, map.head + 1), 0);
    const numbers = layers[chosen[0]?.map.layer ?? 0].heads.slice(0, widest);
    return el(
      "section",
      { class: "layer ruler", "aria-hidden": "true" },
      el("h3"),
      el("div", { class: "heads" }, ...numbers.map((head) => el("span", {}, head))),
    );
  }

  /** Mark the head that the other views show. */
  private mark(): void {
    const { layer, head } = this.app.state;
    this.current?.element.classList.remove("current");
    this.current = this.found.get(layer)?.find(({ map }) => map.head === head) ?? null;
    this.current?.element.classList.add("current");
  }

  /** Heads that come near the screen are drawn, and those that leave it let go of their pictures. */
  private follow(changes: IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting } of changes) {
      const one = this.thumbnails.get(target);
      if (!one) continue;
      if (isIntersecting) this.near.add(one);
      else if (this.near.delete(one)) one.clear();
    }
    this.paint();
  }

  private paint(): void {
    const most = this.differences.quantile(STRONG) ?? 1;
    for (const one of this.near) one.draw(one.map.signed ? most : null);
  }

  /** The scale of the maps, and how far they can be trusted. */
  private remarks(chosen: HeadMap[]): Node[] {
    const own = chosen.some(({ signed }) => !signed) ? "each map is drawn to its own scale" : "";
    const sampled = chosen.filter(({ certainty }) => certainty.state !== "exact");
    const known = sampled.length ? `hatched: ${said(together(sampled.map(({ certainty }) => certainty)))}` : "";
    const text = [own, known, this.app.session.live && hiding.plain(this.app.state.hide)].filter(Boolean).join("; ");
    const notes: Node[] = text ? [el("p", { class: "hint known" }, text)] : [];
    if (!chosen.some(({ signed }) => signed)) return notes;
    const [rows, cols] = this.cellSize;
    const ramp = this.app.ramp(this.differences.quantile(STRONG) ?? 1, true);
    this.legend.draw(ramp, "mean of each cell, A − B; one scale for all heads", true);
    const pooled = `the difference of a head is the mean size of A − B over cells of ${rows} × ${cols} weights`;
    return [...notes, this.legend.element, ...(rows * cols > 1 ? [el("p", { class: "hint" }, pooled)] : [])];
  }

  /** Thumbnails as large as the page has room for. */
  private fit(): void {
    const heads = Math.max(1, ...this.app.capture.layers.map((layer) => layer.heads.length));
    const rows = this.wanted.length || 1;
    const [wide, high] = [(this.body.clientWidth - 160) / heads - 10, (window.innerHeight - 200) / rows - 20];
    const cell = `${Math.floor(Math.max(44, Math.min(wide, Math.max(high, 76), 132)))}px`;
    if (this.body.style.getPropertyValue("--cell") !== cell) this.body.style.setProperty("--cell", cell);
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

function maps(layer: number, one: Overview, less: Difference | null): HeadMap[] {
  const { state, error, retry, of } = one;
  return [...one.entropy.keys()].map((head) => {
    const signed = less !== null && head < less.difference.length;
    const { thumbs, size } = signed ? less : one;
    const count = size[0] * size[1];
    const cells = (): Float32Array => thumbs.values(head * count, (head + 1) * count);
    const difference = signed ? less.difference[head] : NaN;
    const [entropy, distance, max, sink] = [one.entropy[head], one.distance[head], one.max[head], one.sink[head]];
    const certainty = { state, error, retry, of };
    return { layer, head, entropy, distance, max, sink, difference, cells, size, signed, certainty };
  });
}

/** Whether a head passes every word of a filter: `entropy<1`, `sink>0.3`, or a part of its layer's name. */
function passes(map: HeadMap, filter: string, layer: Layer, name: string): boolean {
  return filter
    .toLowerCase()
    .split(/[\s,]+/)
    .filter(Boolean)
    .every((word) => {
      const parts = /^(entropy|distance|max|sink|difference|head)([<>])(\d*\.?\d+)$/.exec(word);
      if (!parts) return layer.name.toLowerCase().includes(word) || name.toLowerCase().includes(word);
      const value = parts[1] === "head" ? layer.heads[map.head] : map[parts[1] as Exclude<Sort, "layer">];
      return parts[2] === "<" ? value < Number(parts[3]) : value > Number(parts[3]);
    });
}

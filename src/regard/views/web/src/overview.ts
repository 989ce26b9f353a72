// Overview: every head of every layer as a small map, with its entropy and a mark where it has a sink.

import { type App, isEmpty, layerNames, type View, words } from "./app";
import { Atlas, NAMES, badge } from "./atlas";
import { COLUMNS, fields, said, together } from "./certainty";
import { Spread } from "./colours";
import { button, menu, notice } from "./controls";
import { arrange, el, fill } from "./element";
import * as hiding from "./hiding";
import { Legend, brief } from "./legend";
import { pause } from "./remote";
import { several } from "./several";
import { Sheet } from "./sheet";
import { type Difference, type Layer, type Overview, Refusal, type Role, ROLES } from "./source";
import type { Sort, State } from "./state";
import { type HeadMap, Thumbnail } from "./thumbnail";

const STRONG = 0.995; // share of all cells that are weaker than the strongest colour of differences
const [RANKED, GAP] = [96, 14]; // pixels across a head in the order of a measure, and between two, as in app.css
const PAUSE = 300; // milliseconds from one drawing to the next while layers come in
const ORDERS = { layer: "by layer", role: "by role", similarity: "by similarity" };
const MEASURES = { entropy: "entropy", distance: "distance", max: "largest weight", sink: "sink" };
const OWN = ["entropy", "distance", "max", "sink", "difference", "effect"] as const;
type Measure = (typeof OWN)[number];

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
    this.notes,
    this.grid,
  );
  private readonly filter: HTMLInputElement;
  private readonly names: string[];
  private readonly resized = new ResizeObserver(() => {
    this.fit();
    if (isMeasure(this.app.state.sort) && this.perRow !== this.columns()) this.drawSoon();
    else this.paint();
  });
  private readonly sheet: Sheet;
  /** Tells which heads come near the screen, and which leave it. */
  private readonly seen: IntersectionObserver;
  private readonly near = new Set<Thumbnail>();
  private readonly legend = new Legend();
  /** The heads of each layer that has been read. */
  private readonly found = new Map<number, Thumbnail[]>();
  private readonly rows = new Map<number, HTMLElement>();
  private readonly thumbnails = new WeakMap<Element, Thumbnail>();
  /** The layers that have heads to show. */
  private wanted: number[] = [];
  private current: Thumbnail | null = null;
  private readonly atlas: Atlas;
  /** The capture that the atlas is of. */
  private atlasOf = -1;
  /** The largest size of an effect. */
  private largestEffect = 0;
  /** Queries and keys of a cell that differences are means of. */
  private cellSize: [number, number] = [1, 1];
  /** The values of all differences, which have one scale. */
  private differences = new Spread();
  private asked = "";
  private pending = 0;
  /** Heads side by side in the order of a measure, as they were last drawn. */
  private perRow = 0;
  /** When the page was last brought up to the state. */
  private drawn = -PAUSE;

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    this.seen = new IntersectionObserver((changes) => this.follow(changes), { root: host, rootMargin: "50%" });
    this.names = layerNames(app.capture.layers);
    this.atlas = new Atlas(app, (layer) => {
      for (const one of layer === null ? [] : (this.found.get(layer) ?? [])) one.describe();
      this.drawSoon();
    });
    this.filter = el("input", {
      type: "search",
      placeholder: "name, sink>0.3, entropy<1",
      "aria-label": "filter",
      "data-control": "filter",
      spellcheck: "false",
      oninput: () => app.go({ filter: this.filter.value }, "slide"),
    });
    this.sheet = new Sheet(host, this.body);
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
    clearTimeout(this.pending);
    this.resized.disconnect();
    this.seen.disconnect();
  }

  tools(): Node[] {
    const { state } = this.app;
    const compared = state.against === "capture" && { difference: "difference A − B" };
    const effect = this.effect();
    const offered = { ...ORDERS, ...MEASURES, ...compared, ...(effect && { effect }) };
    return [menu<Sort>("sort", offered, state.sort, (sort) => this.app.go({ sort })), this.filter, ...(this.app.session.live ? [hiding.tools(this.app)] : [])];
  }

  table(): string[][] {
    const compared = this.app.state.against === "capture";
    const named = ["entropy", "distance", "mean largest weight", "sink", ...(compared ? ["difference A − B"] : [])];
    const effects = [...new Set(this.app.capture.layers.flatMap(({ effects }) => Object.keys(effects)))];
    const scores = this.atlas.roles.size ? ROLES.map((role) => `${NAMES[role][1]} score`) : [];
    const clustered = this.app.state.sort === "similarity" && this.atlas.clusters ? ["cluster"] : [];
    const rows = [["layer", "head", ...named, ...effects, ...(scores.length ? ["roles", ...scores] : []), ...clustered, ...COLUMNS]];
    const clusters = new Map(this.clusters().flatMap((one, n) => one.map((head): [Thumbnail, number] => [head, n])));
    for (const one of this.chosen()) {
      const { map } = one;
      const { name, heads, effects: own } = this.app.capture.layers[map.layer];
      const numbers = [map.entropy, map.distance, map.max, map.sink, ...(compared ? [map.difference] : [])];
      const given = effects.map((effect) => own[effect]?.[map.head] ?? NaN);
      const roles = this.atlas.of(map.layer, map.head).map((role) => NAMES[role][1]);
      const known = scores.length ? [roles.join(", "), ...ROLES.map((role) => String(this.atlas.score(map.layer, map.head, role)))] : [];
      const cluster = clustered.length ? [String(clusters.get(one))] : [];
      rows.push([name, String(heads[map.head]), ...[...numbers, ...given].map(String), ...known, ...cluster, ...fields({ ...map.certainty, error: 0 })]);
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
      const values = this.app.capture.layers[layer].effects[this.effect() ?? ""] ?? [];
      const effect = (head: number): number => values[head] ?? NaN;
      const share = (head: number): number => Math.abs(effect(head)) / (this.largestEffect || 1);
      const given = maps(layer, one, less).map((map) => ({ ...map, effect: effect(map.head), effectShare: () => share(map.head) }));
      this.show(layer, given);
      this.drawSoon();
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
      if (this.atlas.isQuick && key === this.asked) void this.atlas.read(this.wanted).catch(() => {});
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
    if (this.atlasOf !== this.app.state.capture) this.atlas.clear();
    this.atlasOf = this.app.state.capture;
    const values = this.app.capture.layers.flatMap(({ effects }) => effects[this.effect() ?? ""] ?? []);
    this.largestEffect = values.reduce<number>((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
    this.differences = new Spread();
    fill(this.body, this.sheet.element, this.notes, this.grid);
  }

  /** Take the heads of a layer, in place of those that were there. */
  private show(layer: number, maps: HeadMap[]): void {
    for (const old of this.found.get(layer) ?? []) {
      this.seen.unobserve(old.element);
      this.near.delete(old);
      old.element.remove();
    }
    const open = (head: number) => (): void => this.app.go({ view: "map", layer, head, at: null });
    const made = maps.map((map) => new Thumbnail(this.app, map, this.names[layer], this.atlas, open(map.head)));
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
    const { sort, filter, role } = this.app.state;
    const { layers } = this.app.capture;
    const heads = this.wanted.flatMap((layer) => this.found.get(layer) ?? []);
    const found = heads.filter(({ map }) => {
      const own = this.atlas.of(map.layer, map.head);
      const plays = !role || !this.atlas.roles.size || (role === "none" ? !own.length : own.includes(role));
      return plays && passes(map, filter, layers[map.layer], this.names[map.layer], this.atlas);
    });
    return isMeasure(sort) ? found.sort((a, b) => (b.map[sort] || 0) - (a.map[sort] || 0)) : found;
  }

  /** The last of the numbers that the user gave heads, by what it is; null without one. */
  private effect(): string | null {
    return this.app.capture.layers.flatMap(({ effects }) => Object.keys(effects)).pop() ?? null;
  }

  /** The heads of each cluster. */
  private clusters(): Thumbnail[][] {
    const of = ([layer, head]: [number, number]): Thumbnail[] => this.found.get(layer)?.filter(({ map }) => map.head === head) ?? [];
    return this.atlas.clusters?.clusters.map((cluster) => cluster.flatMap(of)) ?? [];
  }

  /** Heads in groups behind their names, those of one role or of one cluster together. */
  private groups(chosen: Thumbnail[]): [name: (Node | string)[], heads: Thumbnail[]][] {
    const counted = (heads: Thumbnail[]): HTMLElement => el("span", { class: "faint" }, heads.length);
    if (this.app.state.sort === "role") {
      const by = new Map<Role | "none", Thumbnail[]>();
      for (const one of chosen) {
        const role = this.atlas.first(one.map.layer, one.map.head);
        by.set(role, [...(by.get(role) ?? []), one]);
      }
      const all = [...ROLES, "none" as const].flatMap((role): [Role | "none", Thumbnail[]][] => (by.has(role) ? [[role, by.get(role)!]] : []));
      return all.map(([role, heads]) => [role === "none" ? ["no role ", counted(heads)] : [badge(role), ` ${NAMES[role][1]} `, counted(heads)], heads]);
    }
    const wanted = new Set(chosen);
    const shown = this.clusters().map((cluster) => cluster.filter((one) => wanted.has(one)));
    const groups = shown.filter((cluster) => cluster.length > 1);
    const alone = shown.filter((cluster) => cluster.length === 1).flat();
    const rest = chosen.filter((one) => !shown.some((cluster) => cluster.includes(one)));
    const found = groups.map((heads): [(Node | string)[], Thumbnail[]] => [[`${heads.length} alike`], heads]);
    if (alone.length) found.push([[`${alone.length} like no other`], alone]);
    return rest.length ? [...found, [[`${rest.length} not compared`], rest]] : found;
  }

  /** Draw at once, or some time after the last time, so that many layers that come one by one share a few frames. */
  private drawSoon(): void {
    this.pending ||= window.setTimeout(() => requestAnimationFrame(() => this.draw()), this.drawn + PAUSE - performance.now());
  }

  /** Bring the page up to the state; heads that are there already stay where they are. */
  private draw(): void {
    clearTimeout(this.pending);
    this.pending = 0;
    if (!this.found.size) return;
    this.drawn = performance.now();
    this.fit(); // before anything changes, so that the browser need not arrange the page twice
    this.body.classList.toggle("with-effects", this.effect() !== null);
    this.grid.className = this.app.state.sort === "similarity" ? "islands" : "";
    const chosen = this.chosen();
    const { sort } = this.app.state;
    if (sort === "role") void this.atlas.read(this.wanted).catch(() => {});
    if (sort === "similarity") void this.atlas.readClusters().catch(() => {});
    const waits = sort === "role" ? !this.atlas.roles.size : sort === "similarity" && !this.atlas.clusters;
    for (const one of chosen) one.write(isMeasure(sort) && Number.isFinite(one.map[sort]) ? brief(one.map[sort]) : null);
    if (!isMeasure(sort) && sort !== "layer") {
      const sections = waits ? [] : this.groups(chosen).map(([name, heads]) => {
        const row = el("div", { class: "heads flat" });
        arrange(row, heads.map(({ element }) => element));
        return el("section", { class: sort === "role" ? "layer group" : "island" }, el("h2", {}, ...name), row);
      });
      arrange(this.grid, sections);
      if (waits) this.grid.append(notice(this.atlas.missing || "comparing the heads …"));
    } else if (sort === "layer") {
      const heads = new Map<number, HTMLElement[]>();
      for (const { map, element } of chosen) heads.set(map.layer, [...(heads.get(map.layer) ?? []), element]);
      const rows = this.wanted.flatMap((layer) => (heads.has(layer) ? [this.row(layer, heads.get(layer)!)] : []));
      arrange(this.grid, [this.ruler(chosen), ...rows]);
    } else {
      this.perRow = this.columns();
      const rows = Array.from({ length: Math.ceil(chosen.length / this.perRow) }, (_, n) => {
        const heads = chosen.slice(n * this.perRow, (n + 1) * this.perRow);
        return el("div", { class: "heads flat ranked" }, ...heads.map(({ element }) => element));
      });
      arrange(this.grid, rows);
    }
    if (!chosen.length) this.grid.append(notice("No head passes the filter."));
    this.mark();
    const effect = this.effect();
    const key = el(
      "p",
      { class: "hint key" },
      el("span", { class: "entropy" }, el("i")),
      "entropy, full where attention is uniform",
      el("span", { class: "sink" }),
      "attention sink, stronger the more it draws",
      ...(effect ? [el("span", { class: "effect" }, el("i")), `${effect}, full at ±${brief(this.largestEffect)}`] : []),
    );
    const ask = (): void => void this.atlas.read(this.wanted).catch(() => {});
    const roles = this.atlas.legend((role) => this.app.go({ role })) ?? (this.atlas.isQuick ? null : button("find the roles of heads", ask));
    fill(this.notes, key, roles, ...this.remarks(chosen.map(({ map }) => map)));
    this.paint();
  }

  /** As many heads as have room side by side in the order of a measure. */
  private columns(): number {
    return Math.max(1, Math.floor((this.grid.clientWidth + GAP) / (RANKED + GAP)));
  }

  /** The heads of a layer behind its name. */
  private row(layer: number, heads: HTMLElement[]): HTMLElement {
    let row = this.rows.get(layer);
    if (!row) {
      const name = el("h2", { title: this.app.capture.layers[layer].name }, this.names[layer]);
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
      el("h2", {}, "layer ↓ head →"),
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
    this.sheet.paint([...this.near].flatMap((one) => one.placed() ?? []));
  }

  /** The scale of the maps, and how far they can be trusted. */
  private remarks(chosen: HeadMap[]): Node[] {
    const own = chosen.some(({ signed }) => !signed) ? "each map is drawn to its own scale" : "";
    const sampled = chosen.filter(({ certainty }) => certainty.state !== "exact");
    const known = sampled.length ? `hatched: ${said(together(sampled.map(({ certainty }) => certainty)))}` : "";
    const { sort } = this.app.state;
    const alike = sort === "similarity" ? this.atlas.similarity() : "";
    const text = [own, ...this.atlas.remarks(), alike, known, this.app.session.live && hiding.plain(this.app.state.hide)].filter(Boolean).join("; ");
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
    return { layer, head, entropy, distance, max, sink, difference, effect: NaN, effectShare: () => 0, cells, size, signed, certainty };
  });
}

function isMeasure(sort: Sort): sort is Measure {
  return (OWN as readonly string[]).includes(sort);
}

/** Whether a head passes every word of a filter: `entropy<1`, `induction>0.3`, a role, or a part of its layer's name. */
function passes(map: HeadMap, filter: string, layer: Layer, name: string, atlas: Atlas): boolean {
  return filter
    .toLowerCase()
    .split(/[\s,]+/)
    .filter(Boolean)
    .every((word) => {
      const parts = /^([a-z_]+)([<>])(-?\d*\.?\d+)$/.exec(word);
      const value = parts && valueOf(map, parts[1], layer, atlas);
      if (parts && value !== null) return parts[2] === "<" ? value < Number(parts[3]) : value > Number(parts[3]);
      const roles = atlas.of(map.layer, map.head).map((role) => NAMES[role][1]);
      return [layer.name.toLowerCase(), name.toLowerCase(), ...roles].some((text) => text.includes(word));
    });
}

/** A number of a head by its name in a filter, null where there is no such number. */
function valueOf(map: HeadMap, name: string, layer: Layer, atlas: Atlas): number | null {
  if (name === "head") return layer.heads[map.head];
  if ((OWN as readonly string[]).includes(name)) return map[name as Measure];
  const role = ROLES.find((role) => role === name || role.startsWith(`${name}_`));
  return role ? atlas.score(map.layer, map.head, role) : null;
}

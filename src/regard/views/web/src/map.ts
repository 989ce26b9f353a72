// Map: the matrix as a deep-zoom picture, from the whole down to one pair; or two of them and their difference.

import { beside, pairOf, partner, turned } from "./aligned";
import { type App, headName, type View, words } from "./app";
import { Card, type Side } from "./card";
import { COLUMNS, digits, fields, said, together } from "./certainty";
import { choice, notice, toggle } from "./controls";
import { el, fill } from "./element";
import * as hiding from "./hiding";
import { Legend, mark, number } from "./legend";
import { joined, type Token } from "./marks";
import { type Events, type Mean, Panel, type Window } from "./panel";
import { PairPanel } from "./pair";
import { matches } from "./search";
import type { Aligned, Axis, Chart, Layer, Place, Range, Tile } from "./source";
import type { State } from "./state";
import type { Cell } from "./tiles";

const CSV_CELLS = 1_000_000; // a spreadsheet takes a few more rows
const WITHOUT = 'Of this layer measures were kept, and no map. Capture it without keep, or with "pool:512" in it.';

const CLOSE = 8; // tokens across, where weights are written into their cells
/** What the bars beside a map are. */
const BARS = (): HTMLElement[] => [
  mark("bar", "right of the map: entropy of each query"),
  mark("bar", "below it: what each key receives"),
];

/** What a panel shows: the one map, or of two compared the first, the second or their difference. */
type Name = "one" | "a" | "b" | "difference";
const SIGNS: Record<Name, string> = { one: "", a: "A", b: "B", difference: "A − B" };

/** The tokens of queries, on the left, and of keys, on top; null where a capture does not know them. */
interface Sides {
  left: Token[] | null;
  top: Token[] | null;
}

interface Shown {
  panel: Panel;
  name: Name;
  chart: Chart;
  signed: boolean;
  most: number;
}

export class MapView implements View {
  readonly keys: Record<string, () => void> = {
    "+": () => this.first?.zoomBy(1.5),
    "=": () => this.first?.zoomBy(1.5),
    "-": () => this.first?.zoomBy(1 / 1.5),
    "0": () => this.app.go({ at: null }),
    ArrowLeft: () => this.go(0, -1),
    ArrowRight: () => this.go(0, 1),
    ArrowUp: () => this.go(-1, 0),
    ArrowDown: () => this.go(1, 0),
    Enter: () => this.enter(),
    i: () => this.inspect(),
    Escape: () => (this.app.state.pair ? this.app.go({ pair: null }) : this.leave()),
    "Shift+ArrowLeft": () => this.first?.panBy(-0.12, 0),
    "Shift+ArrowRight": () => this.first?.panBy(0.12, 0),
    "Shift+ArrowUp": () => this.first?.panBy(0, -0.12),
    "Shift+ArrowDown": () => this.first?.panBy(0, 0.12),
  };
  private readonly panels = el("div", { class: "panels" });
  private readonly legend = new Legend();
  private readonly pairLegend = new Legend();
  private readonly under = el("footer", { class: "under" });
  private readonly card = new Card();
  /** What the cursor of the keys is on, for screen readers. */
  private readonly spoken = el("output", { class: "unseen", "aria-live": "polite" });
  private cursor: { row: number; col: number } | null = null;
  private readonly status = el("div", { class: "status", role: "status" });
  private readonly pair: PairPanel;
  private shown: Shown[] = [];
  private built = "";
  private look = "";
  private drawn = "";
  private moving = false;
  private settling = 0;
  private problem = "";
  /** What is hidden, in words. */
  private hidden = "";
  /** The tokens of the capture, and of the one it is compared with. */
  private words: Sides[] = [];
  /** Which token of A is which of B, where the texts have different lengths. */
  private aligned: Aligned | null = null;
  /** The tokens of both: two texts at a position where they differ. */
  private both: Sides = { left: null, top: null };

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    this.pair = new PairPanel(app);
    fill(
      host,
      el("div", { class: "map" }, el("div", { class: "inspected" }, this.panels, this.pair.element), this.under),
      this.card.element,
      this.spoken,
    );
  }

  private get first(): Panel | undefined {
    return this.shown[0]?.panel;
  }

  update(state: State, before: State | null): void {
    const { other, layer } = this.app;
    if (layer.finest >= layer.levels) return this.without();
    const compared: Name[] = state.layout === "beside" ? ["a", "b", "difference"] : ["difference"];
    const names: Name[] = !other ? ["one"] : this.app.subtractable ? compared : ["a", "b"];
    const key = JSON.stringify([this.app.chart, names, state.pool]);
    const built = JSON.stringify(names.map((name) => this.caption(name)));
    if (built !== this.built) this.build(names);
    this.built = built;
    const look = [state.scale, state.palette, state.range, this.app.theme].join();
    if (key !== this.drawn) this.open(key);
    else if (look !== this.look) this.repaint(true);
    this.look = look;
    if (!this.moving && before && String(state.at) !== String(before.at))
      for (const { panel, name } of this.shown) panel.show(this.seen(windowOf(state), name));
    this.mark().catch((error: unknown) => this.fail(error));
    void this.pair.show(state.pair);
  }

  /** Words in place of a map; the next change of the state asks for it again. */
  private without(text = WITHOUT): void {
    for (const { panel } of this.shown) panel.close();
    [this.shown, this.built, this.drawn] = [[], "", ""];
    fill(this.panels, notice(text));
    fill(this.status);
    fill(this.under, this.status); // a legend would read as "no attention"
  }

  close(): void {
    for (const { panel } of this.shown) panel.close();
    clearTimeout(this.settling);
  }

  tools(): Node[] {
    const { state, layer } = this.app;
    const layouts = { beside: "side by side", difference: "difference" };
    return [
      this.app.subtractable && choice("layout", layouts, state.layout, (layout) => this.app.go({ layout })),
      this.app.session.live &&
        choice("cells", { mean: "mean", max: "max" }, state.pool, (pool) => this.app.go({ pool })),
      this.app.session.live && layer.values !== null &&
        choice("show", { weights: "weights", values: "values" }, state.show, (show) => this.app.go({ show })),
      hiding.tools(this.app),
      toggle("inspect", "a pair", "The weight of one query and one key, step by step  (i).", state.pair !== null, () => this.inspect()),
      !this.app.showsNorms && choice("range", { auto: "auto", full: "0–1" }, state.range, (range) => this.app.go({ range })),
    ].filter((node): node is HTMLElement => node !== false);
  }

  /** A row for each cell on screen: its tokens in each capture, and what each panel has there. */
  table(): string[][] {
    const of = (n: number): string => (this.words.length > 1 ? ` of ${"AB"[n]}` : "");
    const named = (axis: Axis): string[] => this.words.map((_, n) => `${axis} token${of(n)}`);
    const measured = this.shown.flatMap(({ name }) => {
      const sign = SIGNS[name] && `${SIGNS[name]}: `;
      const kind = this.app.showsNorms ? `norm of A ${this.app.layer.values}` : "weight";
      return [`${sign}mean ${kind}`, `${sign}largest ${kind}`, ...COLUMNS.map((column) => sign + column)];
    });
    const rows = [["query", ...named("query"), "key", ...named("key"), "level", ...measured]];
    for (const { row, col, level } of this.first?.cells(CSV_CELLS) ?? []) {
      const theirs = this.aligned ? pairOf(this.aligned, { row, col }) : { row, col };
      const known = (name: Name): boolean => !this.aligned || name !== "b" || (theirs !== null && level === 0);
      const cells = this.shown.map(({ panel, name }): Cell => {
        const at = name === "b" ? theirs : { row, col };
        return at && known(name) ? panel.cell(level, at.row, at.col) : { row, col, level, value: null, largest: null, certainty: null };
      });
      const text = (n: number, side: keyof Sides): string => {
        const at = n ? theirs?.[side === "left" ? "row" : "col"] : side === "left" ? row : col;
        return at === undefined ? "" : (this.words[n][side]?.[at]?.raw ?? "");
      };
      const fits = (cell: Cell): Cell => (cell.level === level ? cell : { ...cell, value: null, largest: null, certainty: null });
      rows.push([
        String(row),
        ...this.words.map((_, n) => text(n, "left")),
        String(col),
        ...this.words.map((_, n) => text(n, "top")),
        String(level),
        ...cells.map(fits).flatMap(({ value, largest, certainty }) => [
          `${value ?? ""}`,
          `${(level === 0 ? value : largest) ?? ""}`,
          ...(this.pads(row, col, level) ? ["padding", "0"] : certainty ? fields(certainty) : ["", ""]),
        ]),
      ]);
    }
    const count = this.first?.count() ?? 0;
    if (count > CSV_CELLS) rows.push([`only the first ${CSV_CELLS} of ${count} cells on screen; zoom in for the others`]);
    return rows;
  }

  /** Whether a cell holds padding alone. */
  private pads(row: number, col: number, level: number): boolean {
    const [rows, cols] = this.first?.padding ?? [[], []];
    const { n_i, n_j } = this.app.layer;
    const inside = (ranges: Range[], at: number, n: number): boolean =>
      ranges.some(([first, last]) => first <= at && Math.min(n, at + 2 ** level) - 1 <= last);
    return inside(rows, row, n_i) || inside(cols, col, n_j);
  }

  private build(names: Name[]): void {
    for (const { panel } of this.shown) panel.close();
    const pair = names.includes("b") && this.pairLegend.element;
    const own = names[names.length - 1] !== "b" && this.legend.element;
    fill(this.under, pair, own, names[0] !== "difference" && el("span", { class: "marks" }, ...BARS()), this.status);
    this.drawn = "";
    this.shown = names.map((name) => {
      const events = this.events(() => panel, name);
      const panel: Panel = new Panel(this.caption(name), this.app.source, this.app.session, events);
      return { panel, name, chart: this.app.chart, signed: name === "difference", most: 1 };
    });
    fill(this.panels, ...this.shown.map(({ panel }) => panel.element));
  }

  /** What a panel is called: captures by name, heads by number. */
  private caption(name: Name): [string, string] | null {
    if (name === "one") return null;
    if (name === "difference") return [SIGNS[name], ""];
    const { capture, head } = name === "a" ? this.app.chart : this.app.other!;
    const compared = this.app.state.against === "capture";
    return [SIGNS[name], compared ? this.app.session.captures[capture].name : headName(this.app.layer, head)];
  }

  private open(key: string): void {
    this.drawn = key;
    const { state, other, chart } = this.app;
    for (const shown of this.shown) {
      const { name, panel, most, signed } = shown;
      shown.chart = name === "a" ? { ...chart, minus: null } : name === "b" && other ? other : chart;
      const of = this.layerOf(name);
      panel.open(shown.chart, of, this.app.ramp(most, signed), state.pool, windowOf(state));
    }
    this.problem = "";
    this.aligned = null;
    this.label(key).catch((error: unknown) => this.fail(error));
  }

  /** Label each panel with the tokens of its own capture, and the difference with those of both. */
  private async label(key: string): Promise<void> {
    const { place, other } = this.app;
    const own = await this.sides(place);
    const others = other && other.capture !== place.capture ? await this.sides(other) : null;
    const aligned = others && !this.app.subtractable ? await this.app.source.aligned(place) : null;
    const hidden = await hiding.words(this.app, place);
    if (key !== this.drawn) return;
    if (hidden !== this.hidden) {
      this.hidden = hidden;
      this.settle();
    }
    this.aligned = aligned;
    this.words = [own, ...(others ? [others] : [])];
    const [rows, cols] = [aligned?.queries, aligned?.keys].map((runs) => runs && ((n: number) => partner(runs, n)));
    this.both = others ? { left: joined(own.left, others.left, rows), top: joined(own.top, others.top, cols) } : own;
    for (const { panel, name } of this.shown) {
      panel.tokens = name === "b" && others ? others : name === "difference" ? this.both : own;
      if (aligned && name === "b") panel.show(this.seen(windowOf(this.app.state), name), true);
      panel.redraw();
    }
    await this.mark();
  }

  private layerOf(name: Name): Layer {
    const { other, layer } = this.app;
    return name === "b" && other ? this.app.session.captures[other.capture].layers[other.layer] : layer;
  }

  /** A part of A as a panel shows it: B beside it has the same tokens in the middle. */
  private seen(window: Window | null, name: Name): Window | null {
    return window && name === "b" && this.aligned ? beside(this.aligned, window) : window;
  }

  private async sides(place: Place): Promise<Sides> {
    const [left, top] = await Promise.all([this.app.tokens(place, "query"), this.app.tokens(place, "key")]);
    return { left, top };
  }

  private async mark(): Promise<void> {
    const { chosen, axis, find, pair } = this.app.state;
    const tokens = find ? await this.app.tokens(this.app.place, axis) : null;
    const found = tokens && find === this.app.state.find ? matches(tokens, find).map(([first]) => first) : [];
    const runs = this.aligned?.[axis === "query" ? "queries" : "keys"];
    const ends = runs && chosen?.map((n) => partner(runs, n));
    const same = ends?.every((n) => n !== null) ? (ends as [number, number]) : null;
    const theirs = runs && find ? this.words[1]?.[axis === "query" ? "left" : "top"] : null;
    const foundThere = theirs ? matches(theirs, find).map(([first]) => first) : [];
    const at = pair && this.aligned ? pairOf(this.aligned, { row: pair[0], col: pair[1] }) : null;
    const partnered: [number, number] | null = at && [at.row, at.col];
    for (const { panel, name } of this.shown) {
      panel.marks = name === "b" && runs ? { chosen: same, axis, found: foundThere, pair: partnered } : { chosen, axis, found, pair };
      panel.redraw();
    }
  }

  private events(panel: () => Panel, name: Name): Events {
    return {
      moved: (window, settled) => this.moved(panel(), name, window, settled),
      pointed: (cell, x, y) => {
        this.cursor = null;
        this.point(cell, x, y, name);
      },
      picked: (cell) => {
        const own = name === "b" && this.aligned ? pairOf(turned(this.aligned), cell) : cell;
        if (own) this.pick({ ...cell, ...own });
      },
      loaded: () => {
        this.problem = "";
        this.settle();
      },
      failed: (error) => this.fail(error),
    };
  }

  /** All panels show the same part; the address follows when it comes to rest. */
  private moved(panel: Panel, name: Name, window: Window, settled: boolean): void {
    if (this.moving) return;
    this.moving = true;
    const own = (seen: Window): Window => (name === "b" && this.aligned ? beside(turned(this.aligned), seen) : seen);
    const at = panel.whole ? null : own(panel.window(true));
    for (const shown of this.shown) if (shown.panel !== panel) shown.panel.show(this.seen(at, shown.name), true);
    if (settled) {
      const { row, col, across } = own(window);
      this.app.go({ at: panel.whole ? null : [row, col, across] }, "slide");
      this.settle();
    }
    this.moving = false;
  }

  /** Once things have come to rest: fit the colours to what is on screen. */
  private settle(): void {
    clearTimeout(this.settling);
    this.settling = window.setTimeout(() => this.repaint(false), 60);
  }

  private repaint(always: boolean): void {
    const { range } = this.app.state;
    const measured = this.shown.map(({ panel }) => (range === "full" && !this.app.showsNorms ? 1 : panel.spread()));
    const pair = Math.max(measured[0] ?? 0, measured[1] ?? 0) || null; // A and B are drawn to the same scale
    this.shown.forEach((shown, n) => {
      const most = (shown.name === "a" || shown.name === "b" ? pair : measured[n]) ?? shown.most;
      if (!always && Math.abs(Math.log(most / shown.most)) < 0.12) return;
      shown.most = most;
      shown.panel.repaint(this.app.ramp(most, shown.signed));
    });
    const last = this.shown[this.shown.length - 1];
    if (!last) return;
    this.legend.draw(this.app.ramp(last.most, last.signed), this.meaning(last), last.panel.clipped());
    const [one, other] = this.shown;
    if (other?.name === "b")
      this.pairLegend.draw(this.app.ramp(one.most), `A and B: ${this.meaning(one)}`, one.panel.clipped() || other.panel.clipped());
    if (this.cursor) this.show(this.cursor);
    for (const { panel } of this.shown) panel.point();
    if (this.problem) return fill(this.status, notice(this.problem));
    const { state: chosen, other: compared } = this.app;
    if (chosen.against === "capture" && !compared) {
      this.status.textContent = `Capture ${"AB"[1 - chosen.capture]} has no such layer, head or text to compare with.`;
      return;
    }
    this.status.textContent = state(this.shown.flatMap(({ panel }) => panel.visible()).map(({ tile }) => tile));
  }

  private meaning({ panel, signed }: Shown): string {
    const level = panel.level();
    const largest = this.app.state.pool === "max";
    const norm = this.app.showsNorms && `norm of A ${this.app.layer.values}`;
    const many = `${largest ? "largest" : "mean"} of ${2 ** level} × ${2 ** level}`;
    const over = norm && typeof this.app.state.head !== "number" ? ` (${this.app.state.head} over heads)` : "";
    const cell = level === 0 ? norm || "weight" : norm ? `${many}: ${norm}` : `${many} weights`;
    const tiles = level > 0 && largest ? panel.visible().filter(({ tile }) => tile.max === null) : [];
    const coming = tiles.some(({ tile }) => tile.retry !== null);
    const unknown = tiles.length ? ` (grey: ${coming ? "on the way" : "not kept in this capture"})` : "";
    const missing = panel.missing() && ` (grey: ${this.hidden ? "nothing is left of the row" : "not a number"})`;
    return [signed ? `${cell}${over}, A − B` : cell + over, this.hidden].filter(Boolean).join(", ") + (unknown || missing || "");
  }

  /** Open the steps of the pair that the cursor or the pointer is on, else of the one in the middle; or close them. */
  private inspect(): void {
    const { pair } = this.app.state;
    const { first, cursor } = this;
    if (pair || !first) return this.app.go({ pair: null });
    const { row, col } = first.window();
    const at = cursor ?? first.hover ?? { row: Math.floor(row), col: Math.floor(col) };
    this.app.go({ pair: [Math.max(0, at.row), Math.max(0, at.col)] });
  }

  private pick(cell: Cell): void {
    if (this.app.state.pair) return this.app.go({ pair: [cell.row, cell.col] }, "slide");
    const { chosen, axis } = this.app.state;
    const same = chosen?.[0] === cell.row && chosen[1] === cell.row && axis === "query";
    this.app.go(same ? { chosen: null } : { chosen: [cell.row, cell.row], axis: "query" });
  }

  /** Move the cursor by some cells, and the map with it. */
  private go(down: number, right: number): void {
    const panel = this.first;
    if (!panel) return;
    const { n_i, n_j } = this.app.layer;
    const size = 2 ** panel.level();
    const step = (at: number, by: number, n: number): number => Math.max(0, Math.min(n - 1, (Math.floor(at / size) + by) * size));
    const { row, col } = panel.window(true);
    const middle = { row: step(row, 0, n_i), col: step(col, 0, n_j) };
    const { cursor } = this;
    this.cursor = cursor ? { row: step(cursor.row, down, n_i), col: step(cursor.col, right, n_j) } : middle;
    panel.reveal(this.cursor);
    this.show(this.cursor);
    if (this.app.state.pair) this.app.go({ pair: [this.cursor.row, this.cursor.col] }, "slide");
  }

  /** Zoom to the cell at the cursor; choose its query where it is a single pair that can be read. */
  private enter(): void {
    const { cursor, first } = this;
    if (!cursor || !first) return;
    const { across } = first.window();
    if (across <= CLOSE + 0.5) return this.pick(first.cell(0, cursor.row, cursor.col));
    this.app.go({ at: [cursor.row + 0.5, cursor.col + 0.5, Math.max(CLOSE, across / 4)] });
  }

  private leave(): void {
    this.cursor = null;
    this.point(null, 0, 0);
    fill(this.spoken);
  }

  /** Show the card of the cell at the cursor, and say it. */
  private show({ row, col }: { row: number; col: number }): void {
    const cell = this.first!.cell(this.first!.level(), row, col);
    this.point(cell, ...this.first!.spot(cell));
    const words = this.card.words();
    if (this.spoken.textContent !== words) this.spoken.textContent = words;
  }

  private point(cell: Cell | null, x: number, y: number, pointed: Name = "one"): void {
    const { aligned } = this;
    const turn = aligned && pointed === "b" ? turned(aligned) : aligned;
    /** The same pair in another panel, which has it unless the texts differ there. */
    const there = (name: Name): { row: number; col: number } | null =>
      cell && turn && (name === "b") !== (pointed === "b") ? pairOf(turn, cell) : cell;
    for (const { panel, name } of this.shown) {
      panel.hover = there(name);
      panel.redraw();
    }
    if (!cell) return this.card.hide();
    const { self, offset, n_i, n_j } = this.layerOf(pointed);
    const tokens = pointed === "b" && aligned ? this.words[1] : this.both;
    const sides: [Side, Side] = [
      { name: "query", tokens: tokens.left, count: n_i, offset: self ? offset : 0 },
      { name: "key", tokens: tokens.top, count: n_j, offset: 0 },
    ];
    const norm = this.app.showsNorms && "norm";
    const values = this.shown.flatMap(({ panel, name, signed }) => {
      const at = there(name);
      const isSame = !aligned || cell.level === 0 || (name === "b") === (pointed === "b");
      return at && isSame ? [{ label: [SIGNS[name], norm].filter(Boolean).join(" "), cell: panel.cell(cell.level, at.row, at.col), signed }] : [];
    });
    const found = this.shown.length === 1 ? this.first!.measured(cell) : null;
    const alone = aligned && cell.level === 0 && values.length < this.shown.length && `not in ${pointed === "b" ? "A" : "B"}`;
    const isEmpty = this.hidden && values.some(({ cell }) => Number.isNaN(cell.value));
    const more = isEmpty ? [alone, "nothing is left of this row"].filter(Boolean) : [
      alone,
      found?.entropy && measure("entropy of", "query", "queries", found.entropy),
      found?.received && measure("received by", "key", "keys", found.received),
    ].filter(Boolean);
    const padding = this.pads(cell.row, cell.col, cell.level);
    this.card.show(x, y, cell, sides, padding ? [] : values, padding ? "padding" : more.join(", "));
  }

  private fail(error: unknown): void {
    const text = words(error);
    if (!text) return;
    this.problem = text;
    fill(this.status, notice(text));
    setTimeout(() => {
      const isBlank = this.shown.length > 0 && this.shown.every(({ panel }) => !panel.visible().length);
      if (this.problem === text && isBlank) this.without(text);
    });
  }
}

/** How exact the tiles on screen are, in words. */
function state(tiles: Tile[]): string {
  const coming = tiles.filter(({ retry }) => retry !== null).length;
  if (coming) return `${coming} of ${tiles.length} tiles are previews; exact ones are on the way`;
  const known = said(together(tiles));
  return known && `weights ${known}`;
}

/** A measure of one query or key, or the mean over several, said as such. */
function measure(name: string, one: string, many: string, { value, over: [first, last], off }: Mean): string {
  const size = off ? digits(off / Math.max(Math.abs(value), 1e-9), 3) : 3;
  const whose = first === last ? `${name} the ${one}` : `mean ${name} ${many} ${first}–${last}`;
  return `${whose} ${number(value, size)}`;
}

function windowOf({ at }: State): Window | null {
  return at && { row: at[0], col: at[1], across: at[2] };
}

/** A line that says which map is shown. */
export function title(app: App): string {
  return `${app.capture.name}, ${app.layer.name}, ${headName(app.layer, app.state.head)}`;
}

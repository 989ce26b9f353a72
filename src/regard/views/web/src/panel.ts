// A panel of the map: OpenSeadragon under token axes, with what is under the pointer, numbers where there is room.

import OpenSeadragon from "openseadragon";
import { Axes } from "./axes";
import type { Ramp } from "./colours";
import { deepZoom, drawnTiles } from "./deepzoom";
import { el, sized } from "./element";
import type { Token } from "./marks";
import * as overlay from "./overlay";
import type { Chart, Layer, Measures, Pool, Range, Source } from "./source";
import type { State } from "./state";
import { type Cell, type Painted, Tiles } from "./tiles";

const MEASURED = 8192; // rows or columns of measures at most
const PATIENCE = 400; // milliseconds that the map before stays under the next one

/** The centre of what is on screen in tokens, and how many tokens are across. */
export interface Window {
  row: number;
  col: number;
  across: number;
}

export interface Events {
  moved(window: Window, settled: boolean): void;
  pointed(cell: Cell | null, x: number, y: number): void;
  picked(cell: Cell): void;
  loaded(): void;
  failed(error: unknown): void;
}

/** The mean of a measure over some neighbours. */
export interface Mean {
  value: number;
  /** The first and the last of them. */
  over: Range;
  /** How far it may be off. */
  off: number;
}

export class Panel {
  readonly element: HTMLElement;
  tokens: { left: Token[] | null; top: Token[] | null } = { left: null, top: null };
  /** Whether the whole map is shown, so that it is fitted again when the window changes. */
  whole = true;
  hover: { row: number; col: number } | null = null;
  marks: Pick<State, "chosen" | "axis" | "pair"> & { found: number[] } = { chosen: null, axis: "query", found: [], pair: null };
  private viewer!: OpenSeadragon.Viewer; // made when the element has its place and size
  private readonly axes = new Axes();
  private readonly deep = el("div", { class: "deep" });
  private readonly cover = el("canvas", { class: "overlay", "aria-hidden": "true" });
  private readonly watch = new ResizeObserver(() => this.resized());
  private tiles: Tiles | null = null;
  private ramp: Ramp | null = null;
  private layer: Layer | null = null;
  private opened: OpenSeadragon.TiledImage | null = null;
  private measures: Measures | null = null;
  private pointer: [number, number] | null = null;
  private ink: overlay.Ink = { line: "", faint: "", ink: "", accent: "", font: "" };
  private pending = 0;

  constructor(
    title: [sign: string, name: string] | null,
    private readonly source: Source,
    private readonly session: { live: boolean; tile: number },
    private readonly events: Events,
  ) {
    const caption = title && el("div", { class: "caption" }, el("b", {}, title[0]), title[1]);
    const name = title?.join(" ") ?? "attention map";
    const about = { class: "panel", role: "group", "aria-label": `${name}: arrow keys go over its cells, Enter zooms` };
    this.element = el("div", about, this.axes.element, this.deep, this.cover, caption);
    this.deep.addEventListener("pointermove", (event) => {
      this.pointer = [event.clientX, event.clientY];
      this.point();
    });
    this.deep.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.events.pointed(null, 0, 0);
    });
    this.watch.observe(this.element);
  }

  close(): void {
    this.watch.disconnect();
    cancelAnimationFrame(this.pending);
    this.tiles?.close();
    this.viewer?.destroy();
    this.layer = null;
  }

  /** Show a map; one of the size of the map before at the same place, the map before staying until it is there. */
  open(chart: Chart, layer: Layer, ramp: Ramp, pool: Pool, at: Window | null): void {
    const same = this.layer?.n_i === layer.n_i && this.layer.n_j === layer.n_j;
    if (!this.viewer) this.begin();
    [this.layer, this.ramp, this.ink] = [layer, ramp, overlay.inkOf(this.element)];
    this.tiles?.close();
    this.tiles = new Tiles(this.source, chart, {
      layer,
      side: this.session.tile,
      live: this.session.live,
      pool,
      ramp,
      wanted: (painted) => this.visible().includes(painted),
      changed: () => {
        this.viewer.forceRedraw();
        this.redraw();
        this.events.loaded();
      },
      failed: this.events.failed,
    });
    this.measure(chart, layer).catch(this.events.failed);
    const { world } = this.viewer;
    const earlier = Array.from({ length: world.getItemCount() }, (_, n) => world.getItemAt(n));
    const drop = (): void => {
      if (this.layer) for (const item of earlier) if (world.getIndexOfItem(item) >= 0) world.removeItem(item);
    };
    const success = ({ item }: { item: OpenSeadragon.TiledImage }): void => {
      this.opened = item;
      if (same && earlier.length) {
        item.addHandler("fully-loaded-change", drop);
        setTimeout(drop, PATIENCE);
      } else {
        drop();
        this.show(at, true);
      }
    };
    this.opened = null;
    this.viewer.addTiledImage({ tileSource: this.tiles.pyramid, success: success as never });
  }

  private begin(): void {
    this.viewer = deepZoom(this.deep);
    const { viewer } = this;
    viewer.addHandler("tile-drawing", (event) => {
      this.tiles?.paint((event as unknown as { rendered: CanvasRenderingContext2D }).rendered);
    });
    viewer.addHandler("update-viewport", () => this.draw());
    viewer.addHandler("animation", () => this.events.moved(this.window(), false));
    viewer.addHandler("animation-finish", () => this.events.moved(this.window(), true));
    for (const name of ["canvas-drag", "canvas-scroll", "canvas-double-click", "canvas-pinch"] as const) {
      viewer.addHandler(name, () => (this.whole = false));
    }
    // OpenSeadragon places the map once more after it has told of the new size.
    const settled = (): void => {
      if (this.whole) this.show(null, true);
      this.opened?.setClip(null); // places the tiles anew, which a resize does not
    };
    viewer.addHandler("after-resize", () => setTimeout(settled));
    viewer.addHandler("canvas-click", (event) => {
      const cell = event.quick ? this.cellAt(event.position.x, event.position.y) : null;
      if (cell) this.events.picked(cell);
    });
  }

  repaint(ramp: Ramp): void {
    if (ramp.theme !== this.ramp?.theme) this.ink = overlay.inkOf(this.element);
    this.ramp = ramp;
    this.tiles?.repaint(ramp);
    this.viewer.forceRedraw();
    this.redraw();
  }

  /** Move to a part of the map, or to the whole: in the middle where that is high, at the top where it is wide. */
  show(at: Window | null, immediately = false): void {
    if (!this.layer) return;
    this.whole = at === null;
    const { viewport } = this.viewer;
    const { n_i, n_j } = this.layer;
    const aspect = viewport.getAspectRatio();
    const margin = 0.01 * Math.max(1, n_i / n_j);
    const width = at ? at.across / n_j : 1 + 2 * margin;
    const height = at ? width / aspect : Math.max(n_i / n_j + 2 * margin, width / aspect);
    const [x, y] = at ? [at.col / n_j - width / 2, at.row / n_j - height / 2] : [-margin, -margin];
    viewport.fitBounds(new OpenSeadragon.Rect(x, y, width, height), immediately);
  }

  zoomBy(factor: number): void {
    this.whole = false;
    this.viewer.viewport.zoomBy(factor).applyConstraints();
  }

  panBy(right: number, down: number): void {
    this.whole = false;
    const { width, height } = this.viewer.viewport.getBounds();
    this.viewer.viewport.panBy(new OpenSeadragon.Point(width * right, height * down)).applyConstraints();
  }

  /** Bring a pair into view if it is out of it. */
  reveal({ row, col }: { row: number; col: number }): void {
    const n = this.layer!.n_j;
    const { x, y, width, height } = this.viewer.viewport.getBounds();
    const at = new OpenSeadragon.Point((col + 0.5) / n, (row + 0.5) / n);
    if (at.x >= x && at.x <= x + width && at.y >= y && at.y <= y + height) return;
    this.whole = false;
    this.viewer.viewport.panTo(at, true);
  }

  /** The middle of a cell, in pixels of the window. */
  spot({ row, col, level }: Cell): [number, number] {
    const { n_i, n_j } = this.layer!;
    const size = 2 ** level;
    const middle = (at: number, n: number): number => {
      const first = Math.floor(at / size) * size;
      return (first + Math.min(n, first + size)) / 2 / n_j;
    };
    const at = new OpenSeadragon.Point(middle(col, n_j), middle(row, n_i));
    const { x, y } = this.viewer.viewport.pixelFromPoint(at, true);
    const box = this.deep.getBoundingClientRect();
    return [box.left + x, box.top + y];
  }

  /** Where the map is going, or where it is now. */
  window(now = false): Window {
    const n = this.layer?.n_j ?? 1;
    const { x, y, width, height } = this.viewer.viewport.getBounds(now);
    return { row: (y + height / 2) * n, col: (x + width / 2) * n, across: width * n };
  }

  /** The tiles of the finest level drawn. */
  visible(): Painted[] {
    const drawn = this.opened ? drawnTiles(this.opened) : [];
    const finest = Math.max(...drawn.map(({ level }) => level));
    return drawn.flatMap(({ level, x, y }) => (level === finest && this.tiles?.tile(level, y, x)) || []);
  }

  /** The finest level drawn, the coarsest while there is none. */
  level(): number {
    return this.visible()[0]?.level ?? (this.layer?.levels ?? 1) - 1;
  }

  /** A strong value of what is on screen, or null while nothing is. */
  spread(): number | null {
    return this.tiles?.spread(this.visible()) ?? null;
  }

  /** Does a cell on screen hold no number? */
  missing(): boolean {
    return this.tiles?.missing(this.visible()) ?? false;
  }

  /** The cells on screen: at most `most` of them. */
  *cells(most: number): Iterable<Cell> {
    const { rows, cols } = this.extent();
    const [level, width] = [this.level(), 2 ** this.level()];
    for (let row = Math.floor(rows[0] / width); row * width <= rows[1]; row++) {
      for (let col = Math.floor(cols[0] / width); col * width <= cols[1]; col++) {
        if (--most < 0) return;
        yield this.cell(level, row * width, col * width);
      }
    }
  }

  /** How many cells are on screen. */
  count(): number {
    const { rows, cols } = this.extent();
    const width = 2 ** this.level();
    const along = ([low, high]: [number, number]): number => Math.floor(high / width) - Math.floor(low / width) + 1;
    return along(rows) * along(cols);
  }

  /** The finest cell known at a pair, no finer than a level. */
  cell(level: number, row: number, col: number): Cell {
    return this.tiles!.cell(level, row, col);
  }

  private cellAt(x: number, y: number): Cell | null {
    if (!this.layer) return null;
    const { n_i, n_j } = this.layer;
    const point = this.viewer.viewport.pointFromPixel(new OpenSeadragon.Point(x, y), true).times(n_j);
    const [row, col] = [Math.floor(point.y), Math.floor(point.x)];
    return row >= 0 && col >= 0 && row < n_i && col < n_j ? this.cell(this.level(), row, col) : null;
  }

  /** Tell what is under the pointer, which changes with the map as well. */
  point(): void {
    if (!this.pointer) return;
    const box = this.deep.getBoundingClientRect();
    const [x, y] = this.pointer;
    this.events.pointed(this.cellAt(x - box.left, y - box.top), x, y);
  }

  /** The measures of one map, drawn beside it; a difference has none. */
  private async measure(chart: Chart, layer: Layer): Promise<void> {
    this.measures = null;
    if (chart.minus) return;
    const level = Math.max(0, Math.ceil(Math.log2(Math.max(layer.n_i, layer.n_j) / MEASURED)));
    const found = await this.source.measures(chart, chart.head, level);
    if (this.tiles?.chart !== chart) return;
    this.measures = found;
    this.redraw();
  }

  /** Is a value on screen larger than the end of the scale? */
  clipped(): boolean {
    return this.tiles?.exceeds(this.visible(), this.ramp?.most ?? Infinity) ?? false;
  }

  /** Entropy of the queries of a cell and what its keys receive, each the mean of a range, where they are known. */
  measured({ row, col, level: own }: Cell): { entropy: Mean | null; received: Mean | null } | null {
    if (!this.measures || !this.layer) return null;
    const { level, entropy, received, off } = this.measures;
    const { n_i, n_j } = this.layer;
    const [rows, cols] = this.padding;
    return {
      entropy: entropy && meanOver(entropy, row, Math.max(own, level), level, n_i, rows, off.entropy),
      received: received && meanOver(received, col, Math.max(own, level), level, n_j, cols, off.received),
    };
  }

  /** The ranges of queries and of keys that are padding. */
  get padding(): [Range[], Range[]] {
    return this.layer?.padding?.[this.tiles?.chart.batch ?? 0] ?? [[], []];
  }

  /** Draw axes and overlay with the next frame. */
  redraw(): void {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  private resized(): void {
    const { clientWidth, clientHeight } = this.element;
    this.axes.element.setAttribute("width", String(clientWidth));
    this.axes.element.setAttribute("height", String(clientHeight));
    this.redraw();
  }

  /** First and last row and column on screen. */
  private extent(): { rows: [number, number]; cols: [number, number] } {
    const { n_i, n_j } = this.layer!;
    const { x, y, width, height } = this.viewer.viewport.getBounds(true);
    const within = (from: number, size: number, n: number): [number, number] => {
      const first = Math.min(n - 1, Math.max(0, Math.floor(from * n_j)));
      return [first, Math.max(first, Math.min(n, Math.ceil((from + size) * n_j)) - 1)];
    };
    return { rows: within(y, height, n_i), cols: within(x, width, n_j) };
  }

  private draw(): void {
    const { layer, ramp } = this;
    const [width, height] = [this.deep.clientWidth, this.deep.clientHeight];
    if (!layer || !ramp || !width || !height) return;
    const { n_i, n_j, self } = layer;
    const bounds = this.viewer.viewport.getBounds(true);
    const scale = width / (bounds.width * n_j);
    const [left, top] = [bounds.x * n_j, bounds.y * n_j];
    const view = {
      context: sized(this.cover, width + overlay.STRIP, height + overlay.STRIP),
      width,
      height,
      scale,
      x: (col: number) => (col - left) * scale,
      y: (row: number) => (row - top) * scale,
      ink: this.ink,
    };
    const { chosen, axis, found, pair } = this.marks;
    const rows = {
      hover: this.hover?.row ?? null,
      chosen: axis === "query" ? chosen : null,
      found: axis === "query" || self ? found : [],
    };
    const cols = {
      hover: this.hover?.col ?? null,
      chosen: axis === "key" ? chosen : null,
      found: axis === "key" || self ? found : [],
    };
    this.axes.draw(
      { from: top, to: top + height / scale, pixels: height, count: n_i, offset: self ? layer.offset : 0 },
      { from: left, to: left + width / scale, pixels: width, count: n_j, offset: 0 },
      [Math.max(0, view.x(0)), Math.max(0, view.y(0))],
      this.tokens,
      { rows, cols },
    );
    overlay.draw(view, {
      size: [n_i, n_j],
      ...this.extent(),
      ramp,
      weight: (row, col) => this.single(row, col),
      found: [rows.found, cols.found],
      chosen: chosen && [chosen, axis],
      pair,
      hover: this.hover && { ...this.hover, level: this.level() },
      previews: this.visible().filter(({ tile }) => tile.state !== "exact"),
      padding: this.padding,
      side: this.session.tile,
      measures: this.measures,
    });
  }

  /** The weight of one pair, where its exact tile is there. */
  private single(row: number, col: number): number | null {
    const cell = this.cell(0, row, col);
    return cell.level === 0 ? cell.value : null;
  }
}

/** The mean over a cell of 2 ** level tokens at a place, from means over 2 ** held real tokens each. */
function meanOver(
  values: Float32Array,
  at: number,
  level: number,
  held: number,
  n: number,
  padding: Range[],
  off: number,
): Mean {
  const [size, step] = [2 ** level, 2 ** held];
  const first = Math.floor(at / size) * size;
  const last = Math.min(n, first + size) - 1;
  let [sum, count] = [0, 0];
  for (let start = first; start <= last; start += step) {
    const stop = Math.min(start + step, n);
    const hidden = padding.reduce((all, [a, b]) => all + Math.max(0, Math.min(b + 1, stop) - Math.max(a, start)), 0);
    const real = stop - start - hidden;
    if (real) sum += real * values[start / step];
    count += real;
  }
  return { value: count ? sum / count : 0, over: [first, last], off };
}

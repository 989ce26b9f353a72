// Tiles of one map: fetched as numbers, coloured here, so that scale and colours change without asking again.

import OpenSeadragon from "openseadragon";
import type { Certainty } from "./certainty";
import { Ramp, Spread } from "./colours";
import { pause } from "./remote";
import { type Chart, type Layer, type Pool, Refusal, type Source, type Tile } from "./source";

/** A tile on its own canvas, which OpenSeadragon draws and which is painted over whenever colours or numbers change. */
export interface Painted {
  level: number;
  row: number;
  col: number;
  tile: Tile;
  context: CanvasRenderingContext2D;
  /** How it is painted, null where that is out of date. */
  with: Ramp | null;
}

/** A cell of the map: a pair of tokens, or of ranges of tokens. */
export interface Cell {
  row: number;
  col: number;
  level: number;
  /** The weight, or the mean of the cell's weights; null while it is not there. */
  value: number | null;
  largest: number | null;
  /** How far these can be trusted; null while they are not there. */
  certainty: Certainty | null;
}

export interface Settings {
  layer: Layer;
  /** Cells a side of a tile. */
  side: number;
  /** Whether coarser levels than the finest can be had. */
  live: boolean;
  pool: Pool;
  ramp: Ramp;
  /** Whether a tile is on screen, so that its preview is worth replacing. */
  wanted(painted: Painted): boolean;
  /** A tile has come, or become exact. */
  changed(): void;
  failed(error: unknown): void;
}

interface Job {
  src: string;
  finish(data: CanvasRenderingContext2D | null, request: null, message?: string): void;
  userData: { stop?: AbortController };
}

const HELD = 240; // canvases, 256 kB each
let made = 0;

export class Tiles {
  readonly pyramid: OpenSeadragon.TileSource;
  private readonly held = new Map<string, Painted>();
  private readonly canvases = new WeakMap<CanvasRenderingContext2D, Painted>();
  private readonly stop = new AbortController();
  /** The level at which the whole map is one tile. */
  private readonly top: number;

  private ramp: Ramp;

  constructor(
    private readonly source: Source,
    readonly chart: Chart,
    private readonly settings: Settings,
  ) {
    [this.ramp, this.top] = [settings.ramp, settings.layer.levels - 1];
    this.pyramid = this.describe();
  }

  close(): void {
    this.stop.abort();
    this.held.clear();
  }

  /** The tile at a row and column of tiles, in OpenSeadragon's count of levels, which runs the other way. */
  tile(theirs: number, row: number, col: number): Painted | undefined {
    return this.held.get(`${this.top - theirs}/${row}/${col}`);
  }

  /** The finest cell known at a pair, no finer than a level. */
  cell(level: number, row: number, col: number): Cell {
    const { side } = this.settings;
    for (let at = level; at <= this.top; at++) {
      const [y, x] = [Math.floor(row / 2 ** at), Math.floor(col / 2 ** at)];
      const found = this.held.get(`${at}/${Math.floor(y / side)}/${Math.floor(x / side)}`);
      if (!found) continue;
      const { mean, max, cols } = found.tile;
      const place = (y % side) * cols + (x % side);
      return { row, col, level: at, value: mean.at(place), largest: max?.at(place) ?? null, certainty: found.tile };
    }
    return { row, col, level, value: null, largest: null, certainty: null };
  }

  /** Other colours; each tile is painted anew when it is next drawn. */
  repaint(ramp: Ramp): void {
    this.ramp = ramp;
  }

  /** Bring the canvas of a tile up to date: numbers to colours. */
  paint(context: CanvasRenderingContext2D): void {
    const painted = this.canvases.get(context);
    if (!painted || painted.with === this.ramp) return;
    const { tile } = painted;
    painted.with = this.ramp;
    context.putImageData(this.ramp.pixels(this.numbers(painted), tile.rows, tile.cols), 0, 0);
  }

  /** What the cells of a tile show: no number where the largest weights are asked for and not known. */
  private numbers(painted: Painted): Float32Array {
    const { mean, max } = painted.tile;
    if (this.settings.pool === "mean" || painted.level === 0) return mean.values();
    return max ? max.values() : new Float32Array(mean.shape[0] * mean.shape[1]).fill(NaN);
  }

  /** The value under which all but a few of the cells of some tiles lie. */
  spread(tiles: Painted[]): number | null {
    const spread = new Spread();
    for (const painted of tiles) spread.add(this.numbers(painted));
    return spread.quantile(0.998);
  }

  /** Is a cell of some tiles larger than a value? */
  exceeds(tiles: Painted[], most: number): boolean {
    return tiles.some((painted) => this.numbers(painted).some((value) => Math.abs(value) > most * 1.001));
  }

  /** Does a cell of some tiles hold no number? */
  missing(tiles: Painted[]): boolean {
    return tiles.some((painted) => this.numbers(painted).some(Number.isNaN));
  }

  private async load(name: string, signal: AbortSignal): Promise<Painted> {
    const known = this.held.get(name);
    if (known) return known;
    const [level, row, col] = name.split("/").map(Number);
    const tile = await this.source.tile(this.chart, this.settings.pool, level, row, col, signal);
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [tile.cols, tile.rows];
    const painted = { level, row, col, tile, context: canvas.getContext("2d")!, with: null };
    this.canvases.set(painted.context, painted);
    this.held.set(name, painted);
    if (this.held.size > HELD) this.held.delete(this.held.keys().next().value!);
    this.settings.changed();
    if (tile.retry !== null) void this.improve(name, painted);
    return painted;
  }

  /** Ask again for a preview until it is exact, or no longer held. */
  private async improve(name: string, painted: Painted): Promise<void> {
    try {
      while (painted.tile.retry !== null && this.held.get(name) === painted) {
        await pause(painted.tile.retry, this.stop.signal);
        if (!this.settings.wanted(painted)) continue;
        const { level, row, col } = painted;
        painted.tile = await this.source.tile(this.chart, this.settings.pool, level, row, col, this.stop.signal);
        if (painted.tile.retry !== null) continue;
        painted.with = null;
        this.settings.changed();
      }
    } catch (error) {
      this.settings.failed(error);
    }
  }

  private describe(): OpenSeadragon.TileSource {
    const { layer, side, live } = this.settings;
    const finest = this.top - layer.finest;
    const pyramid = new OpenSeadragon.TileSource({
      width: layer.n_j,
      height: layer.n_i,
      tileSize: side,
      tileOverlap: 0,
      minLevel: live ? 0 : finest,
      maxLevel: finest,
    } as OpenSeadragon.TileSourceOptions);
    pyramid.getLevelScale = (level) => 2 ** (level - this.top);
    pyramid.getTileUrl = (level, x, y) => `${this.top - level}/${y}/${x}`;
    pyramid.hasTransparency = () => false;
    const jobs = pyramid as unknown as Record<string, (...given: never[]) => unknown>;
    const map = made++; // OpenSeadragon keeps the tiles of all maps in one cache
    jobs["getTileHashKey"] = (level: number, x: number, y: number) => `${map} ${level} ${x} ${y}`;
    jobs["downloadTileStart"] = (job: Job): void => {
      job.userData.stop = new AbortController();
      const signal = AbortSignal.any([this.stop.signal, job.userData.stop.signal]);
      this.load(job.src, signal).then(
        (painted) => job.finish(painted.context, null),
        (error: unknown) => {
          if (signal.aborted) return;
          this.settings.failed(error);
          // A refusal is no failure of the map: its tile stays empty, and the words say why.
          if (error instanceof Refusal) job.finish(document.createElement("canvas").getContext("2d"), null);
          else job.finish(null, null, String(error));
        },
      );
    };
    jobs["downloadTileAbort"] = (job: Job): void => job.userData.stop?.abort();
    jobs["createTileCache"] = (cache: { context: unknown }, context: CanvasRenderingContext2D) =>
      void (cache.context = context);
    jobs["destroyTileCache"] = (cache: { context: unknown }) => void (cache.context = null);
    for (const name of ["getTileCacheData", "getTileCacheDataAsContext2D"]) {
      jobs[name] = (cache: { context: unknown }) => cache.context;
    }
    return pyramid;
  }
}

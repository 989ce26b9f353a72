// The page as a source: what was put into it, and what follows from that.

import { turned } from "./aligned";
import * as answers from "./answers";
import { type Certainty, EXACT, together, within } from "./certainty";
import { flags } from "./hiding";
import { Coded, type Frame, parse } from "./frame";
import {
  type Aligned,
  type Axis,
  type Block,
  type Chart,
  type Clusters,
  type ComparedHead,
  type Difference,
  type Flow,
  type Grouping,
  type Head,
  type Hidden,
  type Layer,
  type Links,
  type PairSteps,
  type Place,
  type Pool,
  type Range,
  type Roles,
  type Session,
  type Source,
  type Tile,
  Refusal,
  TOP,
} from "./source";
import { counted } from "./span";

export class Inline implements Source {
  waiting = (): void => {};
  private readonly kept = new Map<string, Promise<Frame>>();
  private opened: Session | null = null;

  constructor(private readonly resources: Record<string, string>) {}

  async session(): Promise<Session> {
    return (this.opened ??= await this.json<Session>("session?"));
  }

  async text(capture: number, text: number): Promise<string[]> {
    return (await this.json<{ tokens: string[] }>(answers.name.text(capture, text))).tokens;
  }

  group(capture: number, group: number): Promise<Grouping> {
    return this.json(answers.name.group(capture, group));
  }

  async picture(capture: number, picture: number): Promise<string> {
    const bytes = await this.bytes(answers.name.picture(capture, picture));
    return URL.createObjectURL(new Blob([bytes], { type: "image/png" }));
  }

  hidden(place: Place): Promise<Hidden> {
    return this.json(answers.name.hidden(place));
  }

  async overview(place: Place) {
    return answers.overview(await this.frame(answers.name.overview(place)));
  }

  /** As the page holds it, or the other way round. */
  async difference(place: Place, minus: Place): Promise<Difference> {
    const turned = !Object.hasOwn(this.resources, answers.name.difference(place, minus));
    const name = turned ? answers.name.difference(minus, place) : answers.name.difference(place, minus);
    const found = answers.difference(await this.frame(name));
    if (!turned) return found;
    const { shape } = found.thumbs;
    return { ...found, thumbs: Coded.of(found.thumbs.values().map((value) => -value), shape) };
  }

  roles(capture: number, layer: number): Promise<Roles> {
    return this.json(answers.name.roles(capture, layer));
  }

  clusters(capture: number): Promise<Clusters> {
    return this.json(answers.name.clusters(capture));
  }

  async predictions(capture: number, layer: number, batch: number) {
    return answers.predictions(await this.frame(answers.name.predictions(capture, layer, batch)));
  }

  async comparison(): Promise<ComparedHead[]> {
    const found = await this.json<{ rows?: ComparedHead[]; error: string; hint: string }>(answers.name.comparison);
    if (!found.rows) throw new Refusal(found.error, found.hint);
    return found.rows;
  }

  /** As the page holds it, or the other way round. */
  async aligned(place: Place): Promise<Aligned> {
    if (place.capture === 0) return this.json(answers.name.aligned(place));
    const layer = this.layer(place).counterpart ?? 0;
    return turned(await this.json(answers.name.aligned({ ...place, capture: 0, layer })));
  }

  async measures(place: Place, head: Head) {
    const level = this.layer(place).measures_level ?? 0;
    if (place.hide) return { level, entropy: null, received: null, off: { entropy: 0, received: 0 }, ...EXACT };
    return answers.measures(await this.frame(answers.name.measures(place, head, level)), level);
  }

  /** A tile; a page holds means alone. */
  async tile(chart: Chart, _pool: Pool, level: number, row: number, col: number): Promise<Tile> {
    if (chart.hide) return this.renormalizedTile(chart, row, col);
    if (!chart.minus) return this.held(chart, level, row, col);
    const { minus, ...own } = chart;
    const direct = answers.name.tile(chart, level, row, col);
    if (Object.hasOwn(this.resources, direct)) return answers.tile(await this.frame(direct));
    const turned = answers.name.tile({ ...minus, minus: own }, level, row, col);
    if (Object.hasOwn(this.resources, turned)) {
      const found = answers.tile(await this.frame(turned));
      return altered(
        found,
        found.mean.values().map((value) => -value),
      );
    }
    const [one, other] = await Promise.all(
      [own, minus].map((part) => this.held({ ...part, minus: null }, level, row, col)),
    );
    if (one.error || other.error) {
      throw new Refusal(
        `This page holds weights${within(Math.max(one.error, other.error))}, too coarse for this difference.`,
        "Open the capture with `regard view`.",
      );
    }
    const less = other.mean.values();
    return altered(
      { ...one, ...together([one, other]) },
      one.mean.values().map((value, n) => value - less[n]),
    );
  }

  /** A tile without the keys that are hidden, or the difference of two. */
  private async renormalizedTile(chart: Chart, row: number, col: number): Promise<Tile> {
    const { n_i, n_j } = this.layer(chart);
    const parts = await Promise.all([chart, ...(chart.minus ? [chart.minus] : [])].map((one) => this.whole(one, one.head)));
    const side = this.opened!.tile;
    const [rows, cols] = [Math.min(side, n_i - row * side), Math.min(side, n_j - col * side)];
    const values = Float32Array.from({ length: rows * cols }, (_, at) => {
      const place = (row * side + Math.floor(at / cols)) * n_j + col * side + (at % cols);
      return parts.map(({ values }) => values[place]).reduce((one, other) => one - other);
    });
    return { rows, cols, mean: Coded.of(values, [rows, cols]), max: null, ...together(parts) };
  }

  /** A tile of a head, or over all heads, which are held apart where the page has every weight. */
  private async held(chart: Chart, level: number, row: number, col: number): Promise<Tile> {
    const name = answers.name.tile({ ...chart, minus: null }, level, row, col);
    if (typeof chart.head === "number" || Object.hasOwn(this.resources, name))
      return answers.tile(await this.frame(name));
    const heads = [...this.layer(chart).heads.keys()];
    const tiles = await Promise.all(heads.map((head) => this.held({ ...chart, head }, level, row, col)));
    const values = tiles.map((tile) => tile.mean.values());
    const over =
      chart.head === "max"
        ? (n: number) => Math.max(...values.map((v) => v[n]))
        : (n: number) => values.reduce((sum, v) => sum + v[n], 0) / values.length;
    return altered(
      { ...tiles[0], ...together(tiles) },
      Float32Array.from(values[0], (_, n) => over(n)),
    );
  }

  async token(place: Place, head: Head, axis: Axis, first: number, last: number): Promise<Links> {
    const layer = this.layer(place);
    if (layer.finest === 0) return this.fromWeights(place, head, axis, first, last);
    if (!layer.top?.[axis === "query" ? 0 : 1] || typeof head !== "number") {
      throw new Refusal(
        "This page holds no links between single tokens here.",
        typeof head === "number" ? "Open the capture with `regard view`." : "Choose one head.",
      );
    }
    return this.fromLinks(place, head, axis, first, last);
  }

  async block(place: Place, row: number, rows: number, col: number, cols: number): Promise<Block> {
    const layer = this.layer(place);
    if (layer.finest > 0) {
      throw new Refusal(
        "This page holds no single weights, its text is too long for that.",
        "Open the capture with `regard view`.",
      );
    }
    const heads = layer.heads.length;
    const [weight, total] = [new Float32Array(heads * rows * cols), new Float32Array(heads * rows)];
    const parts: Certainty[] = [];
    for (let head = 0; head < heads; head++) {
      const whole = await this.whole(place, head);
      parts.push(whole);
      for (let y = 0; y < rows; y++) {
        const from = (row + y) * layer.n_j;
        weight.set(whole.values.subarray(from + col, from + col + cols), (head * rows + y) * cols);
        total[head * rows + y] = whole.values.subarray(from, from + layer.n_j).reduce((sum, value) => sum + (value || 0), 0);
      }
    }
    return { heads, rows, cols, weight, total, ...together(parts) };
  }

  pair(): Promise<PairSteps> {
    return Promise.reject(
      new Refusal("This page holds weights, and no queries and keys.", "Open the capture with `regard view` to see the steps to a weight."),
    );
  }

  /** Rollout through the mean of the heads, `W = 0.5 P + 0.5 I` with rows that sum to 1, at the page's resolution. */
  async flow({ capture, layer: top, batch }: Place, token: number): Promise<Flow> {
    const { layers } = (await this.session()).captures[capture];
    const { n_i: n, stack: chosen } = layers[top];
    if (!chosen.length) throw new Refusal("Flow needs layers of self-attention over the same tokens.");
    const level = layers[chosen[0]].finest;
    const width = 2 ** level;
    const cells = Math.ceil(n / width);
    const rollout = new Float32Array((chosen.length + 1) * cells);
    rollout[chosen.length * cells + Math.floor(token / width)] = 1;
    const parts: Certainty[] = [];
    for (let at = chosen.length - 1; at >= 0; at--) {
      const mean = await this.whole({ capture, layer: chosen[at], batch }, "mean");
      parts.push(mean);
      for (let y = 0; y < cells; y++) {
        const reached = rollout[(at + 1) * cells + y];
        if (reached === 0) continue;
        const row = Float64Array.from(
          { length: cells },
          (_, x) => 0.5 * mean.values[y * cells + x] * Math.min(width, n - x * width),
        );
        row[y] += 0.5;
        const total = row.reduce((sum, value) => sum + value, 0);
        for (let x = 0; x < cells; x++) rollout[at * cells + x] += (reached * row[x]) / total;
      }
    }
    const certainty = together(parts);
    const state = level > 0 ? "pooled" : certainty.state;
    return { layers: chosen, level, cells, rollout, ...certainty, state };
  }

  async alignment(place: Place, head: Head) {
    return answers.alignment(await this.frame(answers.name.alignment(place, head)));
  }

  private async fromWeights(place: Place, head: Head, axis: Axis, first: number, last: number): Promise<Links> {
    const { n_i, n_j } = this.layer(place);
    const whole = await this.whole(place, head);
    const weight = new Float32Array(axis === "query" ? n_j : n_i);
    let left = 0; // queries that count: they are not padding, and see a key
    const padding = this.padding(place);
    for (let at = first; at <= last; at++) {
      if (axis === "query" && (Number.isNaN(whole.values[at * n_j]) || !counted(padding, at, at))) continue;
      left++;
      for (let n = 0; n < weight.length; n++) {
        weight[n] += (axis === "query" ? whole.values[at * n_j + n] : whole.values[n * n_j + at]) || 0;
      }
    }
    if (axis === "query") weight.forEach((value, n) => (weight[n] = value / left));
    return { ...whole, weight, left, ...strongest(weight) };
  }

  /** From the strongest links: of a span at least so much, and ranked as far as the order is sure. */
  private async fromLinks(place: Place, head: Head, axis: Axis, first: number, last: number): Promise<Links> {
    const { n_i, n_j } = this.layer(place);
    const frame = await this.frame(answers.name.links(place, head));
    const side = axis === "query" ? "given" : "received";
    const [ends, weights] = [frame.values(side), frame.values(`${side}_weight`)];
    const count = frame.coded(side).shape[1];
    const known = new Float32Array(axis === "query" ? n_j : n_i);
    const [held, covered] = [new Uint8Array(known.length), new Float32Array(known.length)];
    const left = axis === "query" ? counted(this.padding(place), first, last) : last + 1 - first;
    const share = axis === "query" ? 1 / Math.max(1, left) : 1;
    let rest = 0; // the most that a token can have from links that are not held, each at most the weakest held
    for (let token = first; token <= last; token++) {
      const weakest = share * weights[(token + 1) * count - 1];
      rest += weakest;
      for (let n = token * count; n < (token + 1) * count; n++) {
        if (!(weights[n] > 0)) continue;
        held[ends[n]] = 1;
        known[ends[n]] += share * weights[n];
        covered[ends[n]] += weakest;
      }
    }
    const { error, ...certainty } = frame.certainty;
    const sure = { ...certainty, error, state: rest > 0 ? ("partial" as const) : ("exact" as const) };
    const most = known.map((value, n) => value + rest - covered[n]);
    // Those of one token are held in their order, which codes of one byte would not tell.
    const own = [...ends.subarray(first * count, (first + 1) * count)].filter((n) => known[n] > 0);
    const top = first === last ? own : surely(strongest(known).top, known, most, error);
    const weight = rest > 0 ? known.map((value, n) => (held[n] ? value : NaN)) : known;
    return { weight, top, topWeight: top.map((n) => known[n]), left, ...sure, of: [count, known.length] };
  }

  /** The queries that are padding. */
  private padding(place: Place): Range[] {
    return this.layer(place).padding?.[place.batch][0] ?? [];
  }

  /** A map of the page at its finest level, from its tiles; without the keys that are hidden. */
  private async whole(place: Place, head: Head): Promise<{ values: Float32Array } & Certainty> {
    const { n_i, n_j, finest, heads } = this.layer(place);
    if (place.hide) {
      if (finest > 0) throw new Refusal("This page holds no single weights, so no keys can be hidden.", "Open the capture with `regard view`.");
      if (typeof head === "number") return this.renormalized(place, head);
      const all = await Promise.all(heads.map((_, n) => this.renormalized(place, n)));
      const values = all[0].values.map((_, at) => {
        const seen = all.map((one) => one.values[at]).filter((value) => !Number.isNaN(value));
        if (!seen.length) return NaN;
        return head === "max" ? Math.max(...seen) : seen.reduce((sum, value) => sum + value, 0) / heads.length;
      });
      return { ...together(all), values };
    }
    const [down, across] = [Math.ceil(n_i / 2 ** finest), Math.ceil(n_j / 2 ** finest)];
    const side = this.opened!.tile;
    const found = new Float32Array(down * across);
    const parts: Certainty[] = [];
    for (let row = 0; row * side < down; row++) {
      for (let col = 0; col * side < across; col++) {
        const tile = await this.tile({ ...place, head, minus: null }, "mean", finest, row, col);
        const values = tile.mean.values();
        parts.push(tile);
        for (let y = 0; y < tile.rows; y++) {
          found.set(values.subarray(y * tile.cols, (y + 1) * tile.cols), (row * side + y) * across + col * side);
        }
      }
    }
    return { values: found, ...together(parts) };
  }

  /** Every weight of a head, divided by what its row gives to the keys that are not hidden; NaN where that is nothing. */
  private async renormalized({ hide, ...place }: Place, head: number): Promise<{ values: Float32Array } & Certainty> {
    const whole = await this.whole(place, head);
    const { n_i, n_j } = this.layer(place);
    const hidden = flags(hide ?? "", await this.hidden(place), n_j);
    const values = whole.values.map((value, at) => (hidden[at % n_j] ? 0 : value));
    for (let row = 0; row < n_i; row++) {
      const own = values.subarray(row * n_j, (row + 1) * n_j);
      const rest = own.reduce((sum, value) => sum + value, 0);
      own.forEach((value, n) => (own[n] = rest > 0 ? value / rest : NaN));
    }
    return { ...whole, values, error: 2 * whole.error };
  }

  private layer({ capture, layer }: Place): Layer {
    return this.opened!.captures[capture].layers[layer];
  }

  private async json<T>(name: string): Promise<T> {
    return JSON.parse(new TextDecoder().decode(await this.bytes(name))) as T;
  }

  private frame(name: string): Promise<Frame> {
    let found = this.kept.get(name);
    if (!found) {
      found = this.bytes(name).then(parse);
      this.kept.set(name, found);
    }
    return found;
  }

  private async bytes(name: string): Promise<ArrayBuffer> {
    if (!Object.hasOwn(this.resources, name)) {
      throw new Refusal("This page does not hold that.", "Open the capture with `regard view` to see everything.");
    }
    const packed = Uint8Array.from(atob(this.resources[name]), (char) => char.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  }
}

function altered(tile: Tile, mean: Float32Array): Tile {
  return { ...tile, mean: Coded.of(mean, tile.mean.shape), max: null };
}

/** The first of some places by weight, as long as none of the others can have more. */
function surely(order: number[], least: Float32Array, most: Float32Array, error: number): number[] {
  const others = new Set(most.keys());
  const found: number[] = [];
  for (const n of order) {
    others.delete(n);
    let next = 0;
    for (const other of others) next = Math.max(next, most[other]);
    if (least[n] * (1 - error) < next * (1 + error)) break;
    found.push(n);
  }
  return found;
}

function strongest(weight: Float32Array): { top: number[]; topWeight: number[] } {
  const top = [...weight.keys()]
    .filter((n) => weight[n] > 0)
    .sort((a, b) => weight[b] - weight[a])
    .slice(0, TOP);
  return { top, topWeight: top.map((n) => weight[n]) };
}

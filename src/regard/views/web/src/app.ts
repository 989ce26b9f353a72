// App: the one state, who may change it, and what all views ask of it.

import { Ramp, type Theme } from "./colours";
import { readable, type Token } from "./marks";
import {
  type Axis,
  type Capture,
  type Chart,
  type Grouping,
  type Layer,
  type Place,
  Refusal,
  type Session,
  type Source,
} from "./source";
import { read, type State, START, write } from "./state";

export interface View {
  /** Show the state; `before` is null the first time. */
  update(state: State, before: State | null): void;
  /** Let go of everything. */
  close(): void;
  /** What is on screen as a table, its first row the names of the columns. */
  table(): string[][] | Promise<string[][]>;
  /** Keys that mean something in this view only. */
  keys?: Record<string, () => void>;
  /** Parts of the toolbar that are this view's own. */
  tools?(): Node[];
}

/** The views in which keys can be hidden. */
const HIDING = new Set(["overview", "map", "text", "lines"]);

export class App {
  state: State;
  private readonly texts = new Map<string, Promise<Token[] | null>>();
  private readonly listeners: ((state: State, before: State) => void)[] = [];
  private readonly media = window.matchMedia("(prefers-color-scheme: dark)");

  constructor(
    readonly source: Source,
    readonly session: Session,
  ) {
    this.state = this.legal(read(location.hash));
    window.addEventListener("hashchange", () => this.change(this.legal(read(location.hash))));
    this.media.addEventListener("change", () => this.change({ ...this.state }));
  }

  listen(listener: (state: State, before: State) => void): void {
    this.listeners.push(listener);
  }

  /** Move to another state. A step can be undone with the browser's back button, a slide cannot. */
  go(change: Partial<State>, how: "step" | "slide" = "step"): void {
    const state = this.legal({ ...this.state, ...change });
    const hash = write(state);
    if (hash === write(this.state)) return;
    try {
      if (how === "step") history.pushState(null, "", `#${hash}`);
      else history.replaceState(null, "", `#${hash}`);
    } catch {
      // A page inside a sandbox has no history; the state holds all the same.
    }
    this.change(state);
  }

  private change(state: State): void {
    const before = this.state;
    this.state = state;
    for (const listener of this.listeners) listener(state, before);
  }

  get theme(): Theme {
    const { theme } = this.state;
    return theme === "auto" ? (this.media.matches ? "dark" : "light") : theme;
  }

  get capture(): Capture {
    return this.session.captures[this.state.capture];
  }

  get layer(): Layer {
    return this.capture.layers[this.state.layer];
  }

  get place(): Place {
    return this.placeOf(this.state.layer);
  }

  /** A layer over the text on screen, without the keys that are hidden. */
  placeOf(layer: number): Place {
    const { capture, batch } = this.state;
    const hide = this.hiding(this.capture.layers[layer]);
    return { capture, layer, batch, ...(hide && { hide }) };
  }

  /** The keys that are hidden in a layer: in views that say so, those that it has. */
  private hiding({ n_j, kind }: Layer): string {
    const { hide, view } = this.state;
    if (!HIDING.has(view) || (view === "overview" && !this.session.live) || kind === "measures") return "";
    return hide.split(",").filter((part) => !(Number(part.split("-").pop()) >= n_j)).join(",");
  }

  /** The map on screen, less what it is compared with. */
  get chart(): Chart {
    const [norms, { other }] = [this.showsNorms && { values: true }, this];
    return { ...this.place, head: this.state.head, ...norms, minus: other && { ...other, ...norms } };
  }

  /** Whether the map shows norms in place of weights: those of what the values add to the output. */
  get showsNorms(): boolean {
    return this.state.show === "values" && this.session.live && this.layer.values !== null;
  }

  /** What the map is compared with: the same head of the other capture, or another head of the same layer. */
  get other(): Chart | null {
    const { against, head } = this.state;
    if (against === "none") return null;
    if (against !== "capture") {
      const name = against.slice("head.".length);
      return { ...this.place, head: name === "mean" ? "mean" : Number(name), minus: null };
    }
    const capture = 1 - this.state.capture;
    const found = this.counterpart(this.state.layer);
    if (found === null) return null;
    const theirs = this.session.captures[capture].layers[found];
    const { batch, heads } = theirs;
    const fits = this.state.batch < batch && (typeof head !== "number" || head < heads.length);
    const hide = this.hiding(theirs);
    return fits ? { capture, layer: found, batch: this.state.batch, head, minus: null, ...(hide && { hide }) } : null;
  }

  /** Whether the map and what it is compared with have the same queries and keys, so that a difference is one of cells. */
  get subtractable(): boolean {
    const { other, layer } = this;
    if (!other) return false;
    const { n_i, n_j } = this.session.captures[other.capture].layers[other.layer];
    return n_i === layer.n_i && n_j === layer.n_j;
  }

  /** The other capture's layer that a layer is compared with. */
  counterpart(layer: number): number | null {
    return this.capture.layers[layer].counterpart;
  }

  /** Refuse what needs single weights where a layer has none. */
  mustHaveWeights(): void {
    if (this.layer.kind === "measures")
      throw new Refusal(
        "Of this layer only measures were kept.",
        "Capture it without keep=[...] to see single weights.",
      );
  }

  ramp(most: number, signed = false): Ramp {
    return new Ramp(this.state.palette, this.theme, this.state.scale, most, signed);
  }

  /** The tokens along an axis of a layer, null where the capture does not know them. */
  tokens(place: Place, axis: Axis): Promise<Token[] | null> {
    const number = this.numbers(this.session.captures[place.capture].layers[place.layer].texts, place.batch, axis);
    const name = `${place.capture} ${number}`;
    let found = this.texts.get(name);
    if (!found) {
      found = number === null ? Promise.resolve(null) : this.source.text(place.capture, number).then(readable);
      this.texts.set(name, found);
    }
    return found;
  }

  /** The words or sentences along an axis of a layer. */
  async groups(place: Place, axis: Axis, name: string): Promise<Grouping | null> {
    const known = this.session.captures[place.capture].layers[place.layer].groups[name];
    const number = known ? this.numbers(known, place.batch, axis) : null;
    return number === null ? null : this.source.group(place.capture, number);
  }

  picture(axis: Axis): number | null {
    return this.numbers(this.layer.picture, this.state.batch, axis);
  }

  private numbers(pairs: [number | null, number | null][], batch: number, axis: Axis): number | null {
    return pairs[Math.min(batch, pairs.length - 1)]?.[axis === "query" ? 0 : 1] ?? null;
  }

  /** A state within what the captures hold. */
  private legal(state: State): State {
    const { captures } = this.session;
    const capture = Math.min(state.capture, captures.length - 1);
    const { layers } = captures[capture];
    const layer = Math.min(state.layer, layers.length - 1);
    const { n_i, n_j, heads, batch } = layers[layer];
    const head = typeof state.head === "number" ? Math.max(0, Math.min(state.head, heads.length - 1)) : state.head;
    const length = state.axis === "query" ? n_i : n_j;
    const chosen = length === 0 ? null : state.chosen && (state.chosen.map((n) => Math.min(n, length - 1)) as [number, number]);
    if (chosen) chosen.sort((a, b) => a - b);
    const pair = n_i && n_j ? state.pair && ([Math.min(state.pair[0], n_i - 1), Math.min(state.pair[1], n_j - 1)] as [number, number]) : null;
    const against = state.against === "capture" && captures.length < 2 ? START.against : state.against;
    const least = Number(against.split(".")[1]);
    return {
      ...state,
      pool: this.session.live ? state.pool : START.pool, // a page holds means alone
      capture,
      layer,
      head,
      batch: Math.max(0, Math.min(state.batch, batch - 1)),
      chosen,
      pair,
      against: least >= heads.length ? START.against : against,
      shown: state.shown && state.shown.filter((n) => n < heads.length),
    };
  }
}

/** What a failed promise says, in words; nothing where it was merely given up. */
export function words(error: unknown): string | null {
  if (error instanceof DOMException && error.name === "AbortError") return null;
  if (error instanceof Refusal) return error.hint ? `${error.message} ${error.hint}` : error.message;
  return error instanceof Error ? error.message : String(error);
}

/** Whether a layer has no texts, heads, queries or keys. */
export function isEmpty({ batch, heads, n_i, n_j }: Layer): boolean {
  return !(batch && heads.length && n_i && n_j);
}

/** A name for a head: its number, or mean or max. */
export function headName(layer: Layer, head: number | "mean" | "max"): string {
  return typeof head === "number" ? `head ${layer.heads[head]}` : `${head} over heads`;
}

/** Layers named shortly: what their names have in common is left out. */
export function layerNames(layers: Layer[]): string[] {
  const names = layers.map(({ name, call }) =>
    layers.filter((other) => other.name === name).length > 1 ? `${name}, ${call}` : name,
  );
  if (names.length < 2) return names;
  const parts = names.map((name) => name.split("."));
  const width = Math.min(...parts.map((part) => part.length));
  let [head, tail] = [0, 0];
  while (head < width - 1 && parts.every((part) => part[head] === parts[0][head])) head++;
  while (
    tail < width - head - 1 &&
    parts.every((part) => part[part.length - 1 - tail] === parts[0][parts[0].length - 1 - tail])
  )
    tail++;
  return parts.map((part) => part.slice(head, part.length - tail).join("."));
}

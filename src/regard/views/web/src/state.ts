// State: everything that makes up what is on screen, as the address spells it.

import { type Palette, PALETTES, type Scale, SCALES } from "./colours";
import { isPart } from "./hiding";
import { type Axis, type Head, type Pool, type Role, ROLES } from "./source";

export const VIEWS = ["overview", "map", "text", "lines", "flow", "images", "alignment", "compare"] as const;
export type ViewName = (typeof VIEWS)[number];
export type Unit = "token" | "words" | "sentences";
export const SORTS = ["layer", "role", "similarity", "entropy", "distance", "max", "sink", "difference", "effect"] as const;
export type Sort = (typeof SORTS)[number];
/** What a map is compared with: nothing, the other capture, or another head of the layer. */
export type Against = "none" | "capture" | `head.${number}` | "head.mean";

export interface State {
  view: ViewName;
  capture: number;
  layer: number;
  batch: number;
  head: Head;
  against: Against;
  /** Both maps and their difference, or the difference alone. */
  layout: "beside" | "difference";
  scale: Scale;
  palette: Palette;
  /** What a cell of many pairs shows of them. */
  pool: Pool;
  /** Map: weights, or the norms of what they add to the output. */
  show: "weights" | "values";
  /** Keys that are hidden, the rest of each row renormalized: kinds and ranges, `sinks,padding,3-5`. */
  hide: string;
  range: "auto" | "full";
  /** Map: the query and the key whose weight is shown step by step. */
  pair: [row: number, col: number] | null;
  /** Centre of the map in tokens, and how many tokens are across; null shows the whole. */
  at: [row: number, col: number, across: number] | null;
  axis: Axis;
  /** First and last of the tokens chosen on `axis`. */
  chosen: [number, number] | null;
  unit: Unit;
  /** Text: whether words are marked by how probable they were. */
  predictions: "shown" | "hidden";
  /** Lines: rows and columns on screen, whether of all layers, and the heads drawn, null for all. */
  window: [row: number, col: number, count: number] | null;
  lines: "head" | "model";
  /** Lines: the sentences they go from and to, `0-1`, `any-1`; empty for all. */
  between: string;
  /** Alignment: each target word's strongest source word, those that choose each other, or every weight. */
  links: "strongest" | "mutual" | "weights";
  shown: number[] | null;
  /** Flow: the layer whose output is followed down, null for the last. */
  top: number | null;
  sort: Sort;
  /** Overview: the role that heads on screen have, "none" for those without one, "" for all heads. */
  role: "" | "none" | Role;
  filter: string;
  find: string;
  theme: "auto" | "light" | "dark";
}

export const START: State = {
  view: "overview",
  capture: 0,
  layer: 0,
  batch: 0,
  head: 0,
  against: "none",
  layout: "beside",
  scale: "sqrt",
  palette: "magma",
  pool: "mean",
  show: "weights",
  hide: "",
  range: "auto",
  pair: null,
  at: null,
  axis: "query",
  chosen: null,
  unit: "token",
  predictions: "shown",
  window: null,
  lines: "head",
  between: "",
  links: "weights",
  shown: null,
  top: null,
  sort: "layer",
  role: "",
  filter: "",
  find: "",
  theme: "auto",
};

type Reader<T> = (text: string) => T | undefined;

const READERS: { [K in keyof State]: Reader<State[K]> } = {
  view: oneOf(VIEWS),
  capture: whole,
  layer: whole,
  batch: whole,
  head: headName,
  against: (text) => (/^(none|capture|head\.(\d{1,6}|mean))$/.test(text) ? (text as Against) : undefined),
  layout: oneOf(["beside", "difference"]),
  scale: oneOf(SCALES),
  palette: oneOf(PALETTES),
  pool: oneOf(["mean", "max"]),
  show: oneOf(["weights", "values"]),
  hide: hidden,
  range: oneOf(["auto", "full"]),
  pair: (text) => integers(text, 2) as State["pair"],
  at: (text) => numbers(text, 3) as State["at"],
  axis: oneOf(["query", "key"]),
  chosen: (text) => integers(text, 2) as State["chosen"],
  unit: oneOf(["token", "words", "sentences"]),
  predictions: oneOf(["shown", "hidden"]),
  window: (text) => integers(text, 3) as State["window"],
  lines: oneOf(["head", "model"]),
  between: (text) => (/^((any|\d{1,9})-(any|\d{1,9}))?$/.test(text) ? text : undefined),
  links: oneOf(["strongest", "mutual", "weights"]),
  shown: (text) => (text === "" ? [] : integers(text)),
  top: whole,
  sort: oneOf(SORTS),
  role: oneOf(["none", ...ROLES]),
  filter: (text) => text.slice(0, 200),
  find: (text) => text.slice(0, 200),
  theme: oneOf(["auto", "light", "dark"]),
};

/** What a hash says, nonsense and unknown names left out. */
export function read(hash: string): State {
  const state: Record<string, unknown> = { ...START };
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const reader = (READERS as Record<string, Reader<unknown>>)[name];
    const value = Object.hasOwn(READERS, name) ? reader(text) : undefined;
    if (value !== undefined) state[name] = value;
  }
  return state as unknown as State;
}

/** The hash of a state: what differs from the start. */
export function write(state: State): string {
  const parameters = new URLSearchParams();
  for (const name of Object.keys(START) as (keyof State)[]) {
    const [value, usual] = [state[name], START[name]];
    if (value === null || String(value) === String(usual)) continue;
    parameters.set(name, Array.isArray(value) ? value.map((n) => +n.toFixed(2)).join(",") : String(value));
  }
  return parameters.toString().replaceAll("%2C", ",");
}

function oneOf<const T extends readonly string[]>(names: T): Reader<T[number]> {
  return (text) => (names.includes(text) ? text : undefined);
}

function hidden(text: string): string | undefined {
  return text.length <= 400 && text.split(",").every(isPart) ? text : undefined;
}

function whole(text: string): number | undefined {
  return /^\d{1,9}$/.test(text) ? Number(text) : undefined;
}

function headName(text: string): Head | undefined {
  return text === "mean" || text === "max" ? text : whole(text);
}

function numbers(text: string, count?: number): number[] | undefined {
  const found = text.split(",").map((part) => (/^-?\d{1,9}(\.\d{1,6})?$/.test(part) ? Number(part) : NaN));
  return found.some(Number.isNaN) || (count !== undefined && found.length !== count) ? undefined : found;
}

function integers(text: string, count?: number): number[] | undefined {
  const found = numbers(text, count);
  return found?.every((n) => Number.isInteger(n) && n >= 0) ? found : undefined;
}

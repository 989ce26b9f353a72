// Source: where the numbers come from, a server or the page itself; and the shapes of what it answers.

import type { Certainty } from "./certainty";
import type { Coded } from "./frame";

export type Head = number | "mean" | "max";
/** What cells of a map show: the mean or the largest of their weights. */
export type Pool = "mean" | "max";
export type Axis = "query" | "key";

/** The first and the last of some neighbours. */
export type Range = [number, number];

export interface Layer {
  name: string;
  call: number;
  batch: number;
  heads: number[];
  n_i: number;
  n_j: number;
  offset: number;
  score: string;
  mask: string | null;
  bias: string | null;
  normalize: string;
  causal: boolean;
  self: boolean;
  /** The layers a token flows through from the output of this one down; none where it cannot be followed. */
  stack: number[];
  kind: "weights" | "measures";
  levels: number;
  finest: number;
  top: [number, number] | null;
  texts: [number | null, number | null][];
  groups: Record<string, [number | null, number | null][]>;
  picture: [number | null, number | null][];
  /** The vectors whose norms value-weighted maps show; null without values. */
  values: "v" | "v W_o" | null;
  /** The layer whose predictions are those of the queries; null without predictions. */
  predictions: number | null;
  /** Numbers that the user gave each head, by what they are; null for a head without one. */
  effects: Record<string, (number | null)[]>;
  /** By batch row the ranges of queries and of keys that are padding, first and last; null without padding. */
  padding: [Range[], Range[]][] | null;
  /** The layer of the other capture that this one is compared with. */
  counterpart: number | null;
  measures_level?: number;
}

export interface Picture {
  width: number;
  height: number;
  rows: number;
  cols: number;
  special: number;
}

export interface Capture {
  name: string;
  facts: Record<string, string>;
  batch: number;
  layers: Layer[];
  /** The length of each text, and its first tokens. */
  texts: { n: number; start: string[] }[];
  groups: { name: string; n: number }[];
  pictures: Picture[];
}

export interface Session {
  live: boolean;
  tile: number;
  /** What an offline page holds, in words. */
  holds?: string;
  captures: Capture[];
}

export interface Grouping {
  ids: number[];
  labels: string[];
}

/** One layer over one batch row. */
export interface Place {
  capture: number;
  /** The keys that are hidden, as the server spells them; none where it is absent or empty. */
  hide?: string;
  /** Whether norms of value-weighted weights stand in place of the weights. */
  values?: boolean;
  layer: number;
  batch: number;
}

/** One map: a head of a place, or that less another. */
export interface Chart extends Place {
  head: Head;
  minus: (Place & { head: Head }) | null;
}

/** The keys of a layer that each kind hides, null where the sinks are not known. */
export type Hidden = Record<"sinks" | "padding" | "punctuation", Range[] | null>;

export interface Overview extends Certainty {
  entropy: Float32Array;
  distance: Float32Array;
  max: Float32Array;
  sink: Float32Array;
  peak: Float32Array;
  peakKey: Float32Array;
  thumbs: Coded;
  /** Rows and columns of a thumbnail. */
  size: [number, number];
}

/** The heads of a layer less those of another. */
export interface Difference extends Certainty {
  /** Of each head, the mean size of the difference of two cells. */
  difference: Float32Array;
  thumbs: Coded;
  size: [number, number];
  /** Queries and keys of a cell. */
  cell: [number, number];
}

/** What heads do; a head may have several roles or none. */
export const ROLES = ["previous_token", "induction", "duplicate_token", "retrieval", "sink", "positional"] as const;
export type Role = (typeof ROLES)[number];

/** The scores of a layer's heads, null where one is not known, and the roles that they name, over all texts. */
export interface Roles {
  scores: Record<Role, number | null>[];
  roles: Role[][];
  notes: string[];
  thresholds: Record<Role, number>;
}

/** Heads that attend alike, by layer and head. */
export interface Clusters {
  clusters: [layer: number, head: number][][];
  /** The mean similarity from which on clusters were joined. */
  similarity: number;
  state: Certainty["state"];
  of: Certainty["of"];
  /** Queries and keys of the cells that similarities are of. */
  cell: [number, number];
}

/** What a language model expected at each position, and behind the last. */
export interface Predictions {
  /** Of the token that stands there; NaN where it is not known. */
  logProbability: Float32Array;
  /** The tokens that were most probable, those first; none at the first position. */
  expected: (n: number) => { name: number; logProbability: number }[];
  names: string[];
}

/** Neighbouring tokens that two texts have: the first in each, and how many. */
export type Run = [ours: number, theirs: number, count: number];

/** Which queries and keys of a layer are which in the other capture. */
export interface Aligned {
  queries: Run[];
  keys: Run[];
}

/** A head of two captures: how much it differs over the tokens that both texts have; nothing where they have none. */
export interface ComparedHead {
  layer: number;
  /** The layer of the second capture. */
  other: number;
  batch: number;
  head: number;
  difference?: number;
  /** Divergences in nats, and the mean squared difference; null where one is infinite. */
  js?: number;
  kl?: number | null;
  mse?: number;
  largest?: number;
  query?: number;
  key?: number;
  other_query?: number;
  other_key?: number;
  /** Of the weights of the aligned queries, the share on tokens of this text alone. */
  unaligned?: number;
  other_unaligned?: number;
}

/** Measures of queries and keys, each null where a capture did not keep it. */
export interface Measures extends Certainty {
  level: number;
  entropy: Float32Array | null;
  received: Float32Array | null;
  /** How far the numbers may be off, by their codes. */
  off: { entropy: number; received: number };
}

export interface Tile extends Certainty {
  rows: number;
  cols: number;
  /** Mean of each cell; the weights themselves at level 0. */
  mean: Coded;
  /** The largest of each cell, where it is known. */
  max: Coded | null;
}

export interface Links extends Certainty {
  /** By position on the other axis; NaN where a page does not hold it. */
  weight: Float32Array;
  top: number[];
  topWeight: number[];
  /** How many of the queries see a key that is not hidden. */
  left: number;
}

export interface Block extends Certainty {
  heads: number;
  rows: number;
  cols: number;
  weight: Float32Array;
  /** What each query of each head gives to all keys, inside the block or not; null where that takes long. */
  total: Float32Array | null;
}

/** The steps from one query and one key to their weight; null where there is none, or it is not finite. */
export interface PairSteps {
  /** Of the terms by dimension; empty where the score is no sum over dimensions. */
  formula: string;
  terms: (number | null)[] | null;
  scale: number | null;
  score: number | null;
  bias: number | null;
  total: number | null;
  visible: boolean;
  statistic: number | null;
  weight: number | null;
  q: (number | null)[];
  k: (number | null)[];
  /** The four terms of the attention, as Python writes them. */
  slots: Record<string, string>;
}

export interface Flow extends Certainty {
  layers: number[];
  level: number;
  cells: number;
  /** Rows from the input, 0, up to the token itself. */
  rollout: Float32Array;
}

export interface Alignment extends Certainty {
  target: string[];
  source: string[];
  weight: Float32Array;
  links: [number, number][];
  mutual: [number, number][];
}

export interface Source {
  /** Told how many answers are waited for, and how much of the slowest is done where that is known. */
  waiting: (count: number, done: number | null) => void;
  session(): Promise<Session>;
  text(capture: number, text: number): Promise<string[]>;
  group(capture: number, group: number): Promise<Grouping>;
  /** The address of a picture that an <img> can show. */
  picture(capture: number, picture: number): Promise<string>;
  hidden(place: Place): Promise<Hidden>;
  overview(place: Place, signal?: AbortSignal): Promise<Overview>;
  difference(place: Place, minus: Place, signal?: AbortSignal): Promise<Difference>;
  roles(capture: number, layer: number): Promise<Roles>;
  clusters(capture: number): Promise<Clusters>;
  /** The predictions of a layer, by the layer that `Layer.predictions` names. */
  predictions(capture: number, layer: number, batch: number): Promise<Predictions>;
  /** The heads of two captures, those first that differ most. */
  comparison(): Promise<ComparedHead[]>;
  aligned(place: Place): Promise<Aligned>;
  measures(place: Place, head: Head, level: number, signal?: AbortSignal): Promise<Measures>;
  tile(chart: Chart, pool: Pool, level: number, row: number, col: number, signal?: AbortSignal): Promise<Tile>;
  token(place: Place, head: Head, axis: Axis, first: number, last: number, signal?: AbortSignal): Promise<Links>;
  block(place: Place, row: number, rows: number, col: number, cols: number, signal?: AbortSignal): Promise<Block>;
  pair(place: Place, head: Head, row: number, col: number, signal?: AbortSignal): Promise<PairSteps>;
  /** Rollout of a token from a layer at the top down. */
  flow(place: Place, token: number, signal?: AbortSignal): Promise<Flow>;
  alignment(place: Place, head: Head, signal?: AbortSignal): Promise<Alignment>;
}

/** An answer that will not come, in words for the reader. */
export class Refusal extends Error {
  constructor(
    message: string,
    readonly hint: string = "",
  ) {
    super(message);
  }
}

/** How many strongest links are asked for. */
export const TOP = 24;

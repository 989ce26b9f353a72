// Answers: frames turned into the shapes of source.ts, the same for a server and a page.

import type { Frame } from "./frame";
import type { Alignment, Block, Chart, Difference, Flow, Head, Links, Measures, Overview, Place, Predictions, Tile } from "./source";

export function overview(frame: Frame): Overview {
  const thumbs = frame.coded("thumbs");
  return {
    entropy: frame.values("entropy"),
    distance: frame.values("distance"),
    max: frame.values("max"),
    sink: frame.values("sink"),
    peak: frame.values("peak"),
    peakKey: frame.values("peak_key"),
    thumbs,
    size: [thumbs.shape[1], thumbs.shape[2]],
    ...frame.certainty,
  };
}

export function difference(frame: Frame): Difference {
  const thumbs = frame.coded("thumbs");
  return {
    difference: frame.values("difference"),
    thumbs,
    size: [thumbs.shape[1], thumbs.shape[2]],
    cell: frame.header["cell"] as [number, number],
    ...frame.certainty,
  };
}

export function measures(frame: Frame, level: number): Measures {
  const [entropy, received] = ["entropy", "received"].map((name) => (frame.has(name) ? frame.coded(name) : null));
  const off = { entropy: entropy?.off ?? 0, received: received?.off ?? 0 };
  const values = { entropy: entropy?.values() ?? null, received: received?.values() ?? null };
  return { level, ...values, off, ...frame.certainty };
}

export function tile(frame: Frame): Tile {
  const mean = frame.coded(frame.has("weight") ? "weight" : "mean");
  const [rows, cols] = mean.shape;
  const max = frame.has("max") ? frame.coded("max") : null;
  return { rows, cols, mean, max, ...frame.certainty };
}

export function links(frame: Frame): Links {
  const [top, topWeight] = [[...frame.values("top")], [...frame.values("top_weight")]];
  return { weight: frame.values("weight"), top, topWeight, left: frame.header["left"] as number, ...frame.certainty };
}

export function block(frame: Frame): Block {
  const coded = frame.coded("weight");
  const [heads, rows, cols] = coded.shape;
  const total = frame.has("total") ? frame.values("total") : null;
  return { heads, rows, cols, weight: coded.values(), total, ...frame.certainty };
}

export function flow(frame: Frame): Flow {
  const coded = frame.coded("rollout");
  const layers = frame.header["layers"] as number[];
  const level = frame.header["level"] as number;
  return { layers, level, cells: coded.shape[1], rollout: coded.values(), ...frame.certainty };
}

export function alignment(frame: Frame): Alignment {
  const { target, source, links, mutual } = frame.header as unknown as Alignment;
  return { target, source, links, mutual, weight: frame.values("weight"), ...frame.certainty };
}

export function predictions(frame: Frame): Predictions {
  const top = frame.coded("top");
  const [numbers, values] = [top.values(), frame.values("top_log_probability")];
  const width = top.shape[1];
  const expected = (n: number) =>
    Array.from({ length: width }, (_, at) => ({ name: numbers[n * width + at] - 1, logProbability: values[n * width + at] })).filter(({ name }) => name >= 0);
  return { logProbability: frame.values("log_probability"), expected, names: frame.header["names"] as string[] };
}

/** The names of resources, spelled as pages hold them. */
export const name = {
  text: (capture: number, text: number) => `text?capture=${capture}&text=${text}`,
  group: (capture: number, group: number) => `group?capture=${capture}&group=${group}`,
  picture: (capture: number, picture: number) => `picture?capture=${capture}&picture=${picture}`,
  hidden: ({ capture, layer, batch }: Place) => `hidden?${where({ capture, layer, batch })}`,
  overview: (place: Place) => `overview?${where(place)}`,
  difference: (place: Place, other: Place) =>
    `difference?${where(place)}&minus=${number(other)}.${other.layer}.${other.batch}`,
  roles: (capture: number, layer: number) => `roles?capture=${capture}&layer=${layer}`,
  clusters: (capture: number) => `clusters?capture=${capture}`,
  predictions: (capture: number, layer: number, batch: number) => `predictions?${where({ capture, layer, batch })}`,
  comparison: "comparison?",
  aligned: ({ capture, layer, batch }: Place) => `same_tokens?${where({ capture, layer, batch })}`,
  measures: (place: Place, head: Head, level: number) => `measures?${where(place)}&head=${head}&level=${level}`,
  tile: (chart: Chart, level: number, row: number, col: number, resource = "tile") =>
    `${resource}?${where(chart)}&head=${chart.head}&minus=${minus(chart)}&level=${level}&row=${row}&col=${col}`,
  token: (place: Place, head: Head, axis: string, first: number, last: number, top: number) =>
    `token?${where(place)}&head=${head}&axis=${axis}&first=${first}&last=${last}&top=${top}`,
  block: (place: Place, row: number, rows: number, col: number, cols: number) =>
    `block?${where(place)}&row=${row}&rows=${rows}&col=${col}&cols=${cols}`,
  pair: (place: Place, head: Head, row: number, col: number) =>
    `pair?${where(place)}&head=${head}&row=${row}&col=${col}`,
  flow: (place: Place, token: number) => `flow?${where(place)}&token=${token}`,
  alignment: (place: Place, head: Head) => `alignment?${where(place)}&head=${head}`,
  links: (place: Place, head: Head) => `links?${where(place)}&head=${head}`,
};

function where(place: Place): string {
  return `capture=${number(place)}&layer=${place.layer}&batch=${place.batch}`;
}

/** The number of a capture, with the keys that are hidden in it, and whether it is weighted by values. */
function number({ capture, hide, values }: Place): string {
  return capture + (hide ? `~${hide.replaceAll(",", "~")}` : "") + (values ? "~values" : "");
}

function minus({ minus }: Chart): string {
  return minus ? `${number(minus)}.${minus.layer}.${minus.batch}.${minus.head}` : "none";
}

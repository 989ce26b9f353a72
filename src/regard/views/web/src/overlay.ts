// What is drawn over a map: its frame, what is chosen, found or pointed at, weights as numbers, previews, measures.

import { type Ramp, type Scale, strength } from "./colours";
import { brief } from "./legend";
import type { Axis, Measures, Range } from "./source";
import type { Painted } from "./tiles";

export const STRIP = 34; // pixels for the measures of rows and columns, beside and below the map
const NUMBERS = 44; // pixels a pair from which on its weight is written into it

/** Where things are: pixels of the overlay from tokens. */
export interface View {
  context: CanvasRenderingContext2D;
  /** Pixels of the map itself, without the strips. */
  width: number;
  height: number;
  /** Pixels a pair. */
  scale: number;
  x(col: number): number;
  y(row: number): number;
  ink: Ink;
}

/** Colours and font of the page, read from its style sheet once and not in every frame. */
export interface Ink {
  line: string;
  faint: string;
  ink: string;
  accent: string;
  font: string;
}

export function inkOf(element: Element): Ink {
  const style = getComputedStyle(element);
  const [line, faint, ink, accent] = ["--line", "--faint", "--ink", "--accent"].map((name) =>
    style.getPropertyValue(name),
  );
  return { line, faint, ink, accent, font: style.fontFamily };
}

/** What there is to draw. */
export interface Scene {
  /** Queries and keys of the map. */
  size: [number, number];
  /** First and last row and column on screen. */
  rows: [number, number];
  cols: [number, number];
  ramp: Ramp;
  /** The weight of a pair, null while its exact tile is not there. */
  weight(row: number, col: number): number | null;
  found: [rows: number[], cols: number[]];
  chosen: [range: [number, number], axis: Axis] | null;
  /** The pair whose steps are shown. */
  pair: [row: number, col: number] | null;
  hover: { row: number; col: number; level: number } | null;
  previews: Painted[];
  /** Cells a side of a tile. */
  side: number;
  measures: Measures | null;
  /** The ranges of rows and of columns that are padding. */
  padding: [Range[], Range[]];
}

export function draw(view: View, scene: Scene): void {
  const { context } = view;
  context.save();
  context.beginPath();
  context.rect(0, 0, view.width, view.height);
  context.clip();
  drawPadding(view, ...scene.padding, scene.size);
  drawFrame(view, ...scene.size);
  drawNumbers(view, scene);
  drawFound(view, ...scene.found);
  if (scene.chosen) drawChosen(view, ...scene.chosen, scene.size);
  if (scene.pair) drawPair(view, ...scene.pair);
  if (scene.hover) drawHover(view, scene.hover.row, scene.hover.col, scene.hover.level);
  drawPreviews(view, scene.previews, scene.side);
  context.restore();
  if (scene.measures) drawMeasures(view, scene.measures, scene.size, scene.ramp.scale);
}

function drawFrame({ context, x, y, scale, ink }: View, rows: number, cols: number): void {
  context.strokeStyle = ink.line;
  context.strokeRect(
    Math.round(x(0)) - 0.5,
    Math.round(y(0)) - 0.5,
    Math.round(cols * scale) + 1,
    Math.round(rows * scale) + 1,
  );
}

/** Hatching over queries and keys that are padding, in place of colours. */
function drawPadding({ context, x, y, ink }: View, rows: Range[], cols: Range[], [n_i, n_j]: [number, number]): void {
  const hatch = (left: number, top: number, right: number, bottom: number): void => {
    context.save();
    context.beginPath();
    context.rect(left, top, right - left, bottom - top);
    context.clip();
    context.strokeStyle = ink.line;
    context.beginPath();
    const [first, last] = [Math.max(left, 0) - Math.min(bottom, context.canvas.height), Math.min(right, context.canvas.width)];
    for (let at = Math.floor(first / 7) * 7; at < last; at += 7) {
      context.moveTo(at, Math.min(bottom, context.canvas.height));
      context.lineTo(at + Math.min(bottom, context.canvas.height), 0);
    }
    context.stroke();
    context.restore();
  };
  for (const [first, last] of rows) hatch(x(0), y(first), x(n_j), y(last + 1));
  for (const [first, last] of cols) hatch(x(first), y(0), x(last + 1), y(n_i));
}

/** Ticks at the edge for tokens that a search has found. */
function drawFound({ context, x, y, scale, ink }: View, rows: number[], cols: number[]): void {
  context.fillStyle = ink.accent;
  const size = Math.max(2, Math.min(scale, 6));
  const [edge, ceiling] = [Math.max(0, x(0)), Math.max(0, y(0))];
  for (const row of rows) context.fillRect(edge, y(row + 0.5) - size / 2, 5, size);
  for (const col of cols) context.fillRect(x(col + 0.5) - size / 2, ceiling, size, 5);
}

/** A frame around the rows, or the columns, that are chosen. */
function drawChosen(
  { context, scale, x, y, ink }: View,
  chosen: [number, number],
  axis: Axis,
  [rows, cols]: [number, number],
): void {
  const size = (chosen[1] - chosen[0] + 1) * scale;
  context.strokeStyle = ink.accent;
  context.lineWidth = 1.5;
  if (axis === "query") context.strokeRect(x(0), y(chosen[0]) - 0.5, cols * scale, size + 1);
  else context.strokeRect(x(chosen[0]) - 0.5, y(0), size + 1, rows * scale);
  context.lineWidth = 1;
}

/** A frame around one pair, large enough to be seen at any zoom. */
function drawPair({ context, scale, x, y, ink }: View, row: number, col: number): void {
  const size = Math.max(scale, 7);
  context.strokeStyle = ink.accent;
  context.lineWidth = 2;
  context.strokeRect(x(col + 0.5) - size / 2, y(row + 0.5) - size / 2, size, size);
  context.lineWidth = 1;
}

/** The cell under the pointer, with lines to both axes. */
function drawHover({ context, x, y, scale, ink }: View, row: number, col: number, level: number): void {
  const width = 2 ** level;
  const [top, left, size] = [y(Math.floor(row / width) * width), x(Math.floor(col / width) * width), width * scale];
  context.strokeStyle = context.fillStyle = ink.ink;
  context.globalAlpha = 0.3;
  const [edge, ceiling] = [Math.max(0, x(0)), Math.max(0, y(0))];
  context.fillRect(edge, top + size / 2 - 0.5, Math.max(0, left - edge), 1);
  context.fillRect(left + size / 2 - 0.5, ceiling, 1, Math.max(0, top - ceiling));
  context.globalAlpha = 1;
  if (size >= 5) context.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
}

/** Weights as numbers, where a pair is large enough to hold one. */
function drawNumbers({ context, x, y, scale, ink }: View, { rows, cols, weight, ramp }: Scene): void {
  if (scale < NUMBERS) return;
  context.font = `${Math.min(13, scale / 4)}px ${ink.font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let row = rows[0]; row <= rows[1]; row++) {
    for (let col = cols[0]; col <= cols[1]; col++) {
      const value = weight(row, col);
      if (!value) continue;
      context.fillStyle = ramp.ink(value);
      context.fillText(figure(value), x(col + 0.5), y(row + 0.5));
    }
  }
}

/** A dashed frame around tiles that are not exact yet. */
function drawPreviews({ context, x, y, scale, ink }: View, tiles: Painted[], side: number): void {
  context.save();
  context.setLineDash([4, 4]);
  context.strokeStyle = ink.faint;
  for (const { level, row, col, tile } of tiles) {
    const [cell, first] = [2 ** level * scale, side * 2 ** level];
    context.strokeRect(x(col * first) + 2, y(row * first) + 2, tile.cols * cell - 4, tile.rows * cell - 4);
  }
  context.restore();
}

/** Beside each row its entropy, below each column what it receives: bars to the scale of the colours. */
function drawMeasures(view: View, measures: Measures, [rows, cols]: [number, number], scale: Scale): void {
  const { context, x, y } = view;
  const [right, bottom] = [Math.min(view.width, x(cols)) + 7, Math.min(view.height, y(rows)) + 7];
  context.fillStyle = view.ink.faint;
  context.globalAlpha = 0.6;
  const cell = 2 ** measures.level * view.scale;
  const bars = (
    values: Float32Array | null,
    start: number,
    end: number,
    bar: (at: number, size: number, length: number) => void,
  ): void => {
    if (!values) return;
    const most = values.reduce((top, value) => Math.max(top, value || 0), 1e-9);
    const many = Math.max(1, Math.floor(1 / cell)); // cells a pixel, of which the largest is drawn
    for (let n = Math.max(0, Math.floor(-start / cell)); n < values.length && start + n * cell < end; n += many) {
      const at = Math.max(0, start + n * cell);
      const size = Math.min(end, start + (n + many) * cell) - at;
      const value = many === 1 ? values[n] : values.subarray(n, n + many).reduce((top, one) => Math.max(top, one), 0);
      bar(at, Math.max(0.5, size - (cell > 6 ? 1 : 0)), strength(value / most, scale) * (STRIP - 10));
    }
  };
  bars(measures.entropy, y(0), bottom - 7, (at, size, length) => context.fillRect(right, at, length, size));
  bars(measures.received, x(0), right - 7, (at, size, length) => context.fillRect(at, bottom, size, length));
  context.globalAlpha = 1;
}

/** A weight in few characters, to be read inside a cell. */
function figure(value: number): string {
  const size = Math.abs(value);
  return size >= 0.995 || size < 0.001 ? brief(value) : value.toFixed(size >= 0.01 ? 2 : 3).replace("0.", ".");
}

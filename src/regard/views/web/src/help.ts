// Help: each view in two sentences with a small picture, the terms, and the keys.

import { el, svg } from "./element";
import { SENTENCES, TERMS } from "./glossary";
import { KEYS } from "./keyboard";
import { type ViewName, VIEWS } from "./state";

/** A rectangle of a picture: left, top, width, height, and how strong it is. */
type Box = [x: number, y: number, width: number, height: number, strength: number];
const [WIDTH, HEIGHT] = [84, 54];

/** A small map whose weights lie on and below the diagonal. */
const map = (left: number, top: number, cell: number, count: number, strength: (i: number, j: number) => number): Box[] =>
  Array.from({ length: count * count }, (_, n): Box => {
    const [i, j] = [Math.floor(n / count), n % count];
    return [left + j * cell, top + i * cell, cell - 1, cell - 1, j > i ? 0.06 : strength(i, j)];
  });
const near = (i: number, j: number): number => (i - j < 2 ? 0.9 : 0.15);
const first = (_i: number, j: number): number => (j === 0 ? 0.9 : 0.15);
const earlier = (i: number, j: number): number => (j === Math.floor(i / 2) ? 0.9 : 0.15);
const lines = (top: number, strengths: number[][]): Box[] =>
  strengths.flatMap((row, y) => row.map((strength, x): Box => [6 + x * 15, top + y * 11, 13, 7, strength]));

const BOXES: Record<ViewName, Box[]> = {
  overview: [near, first, earlier, first, near, near].flatMap((kind, n) => map(7 + (n % 3) * 25, 3 + Math.floor(n / 3) * 25, 5.5, 4, kind)),
  map: map(18, 3, 8, 6, (i, j) => (j === 0 ? 0.5 : near(i, j))),
  text: lines(7, [[0.12, 0.9, 0.12, 0.12, 0.3], [0.12, 0.12, 0.6, 0.12, 0.12], [0.3, 0.12, 0.12, 0.12, 1], [0.06, 0.06, 0.06, 0.06, 0.06]]),
  lines: [0, 1, 2, 3].flatMap((n): Box[] => [[4, 5 + n * 12, 22, 7, 0.25], [58, 5 + n * 12, 22, 7, 0.25]]),
  flow: lines(6, [[0.05, 0.05, 0.05, 0.05, 1], [0.05, 0.2, 0.05, 0.3, 0.8], [0.3, 0.3, 0.1, 0.4, 0.5], [0.6, 0.3, 0.15, 0.35, 0.3]]),
  images: Array.from({ length: 24 }, (_, n): Box => [12 + (n % 6) * 10, 7 + Math.floor(n / 6) * 10, 9, 9, [9, 10, 15, 16].includes(n) ? 0.9 : 0.15]),
  compare: [70, 48, 30, 14].flatMap((width, n): Box[] => [[6, 6 + n * 11, width, 7, n ? 0.4 : 0.9]]),
  alignment: [0, 1, 2, 3].flatMap((n): Box[] => [[4 + n * 20, 5, 16, 8, 0.25], [4 + n * 20, 41, 16, 8, 0.25]]),
};
const STROKES: Partial<Record<ViewName, string>> = {
  lines: "M27,9C42,9 42,21 57,21M27,21C42,21 42,9 57,9M27,33C42,33 42,9 57,9M27,45C42,45 42,33 57,33",
  alignment: "M12,14L12,40M32,14L52,40M52,14L32,40M72,14L72,40",
};

function picture(view: ViewName): SVGSVGElement {
  const boxes = BOXES[view].map(([x, y, width, height, strength]) =>
    svg("rect", { x, y, width, height, rx: 1.5, "fill-opacity": strength }),
  );
  const stroke = STROKES[view] && svg("path", { d: STROKES[view] });
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, "aria-hidden": "true" }, ...boxes, stroke);
}

/** The dialog; it closes with Escape, the same key again, or a click beside it. */
export function help(): HTMLDialogElement {
  const views = VIEWS.map((view) =>
    el("section", { class: "view" }, picture(view), el("div", {}, el("h4", {}, view), el("p", {}, SENTENCES[view]))),
  );
  const terms = TERMS.flatMap(([term, meaning]) => [el("dt", {}, term), el("dd", {}, meaning)]);
  const keys = KEYS.map(({ title, keys }) => {
    const pairs = keys.flatMap(([key, act]) => [
      el("dt", {}, ...key.split(" ").map((part) => el("kbd", {}, part))),
      el("dd", {}, act),
    ]);
    return el("section", {}, el("h4", {}, title), el("dl", {}, ...pairs));
  });
  const body = el(
    "div",
    { tabindex: 0 },
    el("h2", {}, "Help"),
    el("h3", {}, "Views"),
    el("div", { class: "views" }, ...views),
    el("h3", {}, "Terms"),
    el("dl", { class: "terms" }, ...terms),
    el("h3", {}, "Keys"),
    el("div", { class: "columns" }, ...keys),
  );
  const dialog = el("dialog", { class: "help", "aria-label": "help" }, body);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", (event) => {
    if (event.key !== "?") return;
    event.stopPropagation(); // it would be opened again
    dialog.close();
  });
  return dialog;
}

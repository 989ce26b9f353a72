// Two columns of words joined by links: heads over tokens, or a sentence and its translation.

import type { App } from "./app";
import { svg } from "./element";
import { short } from "./glyphs";
import type { Axis } from "./source";

export interface Link {
  left: number;
  right: number;
  /** From 0 to 1: how dark it is drawn. */
  weight: number;
  colour: string;
}

const LINE = 21;
const LETTERS = 22;
const MOST = 4000; // links drawn

/** One of the columns: the words of a stretch of an axis, from its place `first` on. */
export interface Side {
  title: string;
  axis: Axis;
  first: number;
  words: string[];
}

/** Two columns joined by links, at most `most` pixels wide; a click on a word chooses it. */
export function columns(
  app: App,
  host: HTMLElement,
  sides: { left: Side; right: Side },
  links: Link[],
  most: number,
): SVGSVGElement {
  const { axis, chosen } = app.state;
  const width = Math.min(most, host.clientWidth || most);
  const margin = Math.min(210, width * 0.32);
  const [from, to] = [margin, width - margin];
  const height = Math.max(sides.left.words.length, sides.right.words.length) * LINE + 40;
  const y = (n: number): number => 34 + (n + 0.5) * LINE;
  const drawn = [...links]
    .sort((a, b) => b.weight - a.weight)
    .slice(0, MOST)
    .reverse();
  const curve = ({ left, right }: Link): string => {
    const bend = (to - from) * 0.42;
    return `M${from + 8},${y(left)}C${from + 8 + bend},${y(left)} ${to - 8 - bend},${y(right)} ${to - 8},${y(right)}`;
  };
  const paths = drawn.map((link) =>
    svg("path", {
      d: curve(link),
      class: "link",
      stroke: link.colour,
      "stroke-opacity": Math.min(1, link.weight).toFixed(3),
      "stroke-width": (0.8 + 2.4 * link.weight).toFixed(2),
      fill: "none",
    }),
  );
  /** Draw only the links of one word, or all of them. */
  const isolate = (side: "left" | "right", n: number | null): void => {
    drawn.forEach((link, at) => paths[at].classList.toggle("hidden", n !== null && link[side] !== n));
  };
  const words = (side: "left" | "right"): SVGElement[] =>
    sides[side].words.map((text, n) => {
      const at = sides[side].first + n;
      const pick = (): void => app.go({ chosen: [at, at], axis: sides[side].axis });
      const label = svg(
        "text",
        { x: side === "left" ? from : to, y: y(n), dy: "0.34em", "text-anchor": side === "left" ? "end" : "start" },
        short(text, LETTERS),
      );
      const area = svg("rect", {
        x: side === "left" ? 0 : to - 8,
        y: y(n) - LINE / 2,
        width: margin + 8,
        height: LINE,
        class: "area",
      });
      return svg(
        "g",
        {
          class: `word${chosen?.[0] === at && axis === sides[side].axis ? " chosen" : ""}`,
          role: "button",
          tabindex: 0,
          "aria-label": `${sides[side].title} ${at}: ${short(text, 60)}`,
          onpointerenter: () => isolate(side, n),
          onpointerleave: () => isolate(side, null),
          onfocus: () => isolate(side, n),
          onblur: () => isolate(side, null),
          onclick: pick,
          onkeydown: (event: KeyboardEvent) => {
            if (event.key !== "Enter") return;
            event.stopPropagation();
            pick();
          },
        },
        area,
        label,
      );
    });
  const heads = [
    svg("text", { x: from, y: 16, "text-anchor": "end", class: "axis-title" }, sides.left.title),
    svg("text", { x: to, y: 16, "text-anchor": "start", class: "axis-title" }, sides.right.title),
  ];
  return svg(
    "svg",
    { width, height, class: "columns" },
    svg("g", {}, ...paths),
    ...heads,
    ...words("left"),
    ...words("right"),
  );
}

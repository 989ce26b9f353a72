// Two columns of words joined by links: heads over tokens, or a sentence and its translation.

import type { App } from "./app";
import { el, svg } from "./element";
import { short } from "./glyphs";
import type { Axis } from "./source";

export interface Link {
  left: number;
  right: number;
  /** From 0 to 1: how dark it is drawn. */
  weight: number;
  colour: string;
  /** Its place among the heads that are drawn, and what it is, in words; absent where lines are of one kind. */
  head?: number;
  about?: string;
}

const LINE = 21;
const LETTERS = 22;
const MOST = 4000; // links drawn
const STRIPES = 72; // pixels of the stripes of all heads
const NEAR = 5; // pixels from the pointer to the link that it is on

/** One of the columns: the words of a stretch of an axis, from its place `first` on. */
export interface Side {
  title: string;
  axis: Axis;
  first: number;
  words: string[];
  /** Of what each word gives, the share that goes to words that are not drawn. */
  outside?: number[];
}

/** Two columns joined by links, at most `most` pixels wide; a click on a word chooses it. */
export function columns(
  app: App,
  host: HTMLElement,
  sides: { left: Side; right: Side },
  links: Link[],
  most: number,
  heads = 0,
): SVGSVGElement {
  const { axis, chosen } = app.state;
  const { paddingLeft, paddingRight } = getComputedStyle(host);
  const width = Math.min(most, host.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight) || most);
  const margin = Math.min(210, width * 0.32);
  const [from, to] = [margin, width - margin];
  const height = Math.max(sides.left.words.length, sides.right.words.length) * LINE + 40;
  const y = (n: number): number => 34 + (n + 0.5) * LINE;
  const drawn = [...links]
    .sort((a, b) => b.weight - a.weight)
    .slice(0, MOST)
    .reverse();
  const [start, end] = [from + 8, to - 8];
  const curve = ({ left, right }: Link): string => {
    const bend = (to - from) * 0.42;
    return `M${start},${y(left)}C${start + bend},${y(left)} ${end - bend},${y(right)} ${end},${y(right)}`;
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
  const stripes = svg("g", { class: "stripes" });
  /** Draw only the links of one word, and at their other ends a stripe for each head and the largest weight; or all. */
  const isolate = (side: "left" | "right", n: number | null): void => {
    drawn.forEach((link, at) => paths[at].classList.toggle("hidden", n !== null && link[side] !== n));
    stripes.replaceChildren();
    if (n === null || !heads) return;
    const other = side === "left" ? "right" : "left";
    const strongest = new Map<number, Link>();
    for (const link of links) {
      if (link[side] !== n) continue;
      stripes.append(stripe(link, link[other], other));
      if (link.weight > (strongest.get(link[other])?.weight ?? 0)) strongest.set(link[other], link);
    }
    for (const [at, { about }] of strongest) stripes.append(weightAt(at, other, about ?? ""));
  };
  const stripe = (link: Link, at: number, side: "left" | "right"): SVGElement => {
    const wide = STRIPES / heads;
    const x = (side === "left" ? start : end - STRIPES) + (link.head ?? 0) * wide;
    const place = { x, y: y(at) - LINE / 2 + 2, width: wide, height: LINE - 4, fill: link.colour };
    return svg("rect", { ...place, "fill-opacity": Math.min(1, link.weight).toFixed(3), class: "stripe", "data-n": at });
  };
  const weightAt = (at: number, side: "left" | "right", about: string): SVGElement => {
    const place = { x: side === "left" ? 2 : width - 2, "text-anchor": side === "left" ? "start" : "end" };
    return svg("text", { ...place, y: y(at), dy: "0.34em", class: "weight", "data-n": at }, about);
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
      const outside = sides[side].outside?.[n] ?? 0;
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
        outside > 0 && mark(outside, from + 2, y(n)),
      );
    });
  const titles = [
    svg("text", { x: from, y: 16, "text-anchor": "end", class: "axis-title" }, sides.left.title),
    svg("text", { x: to, y: 16, "text-anchor": "start", class: "axis-title" }, sides.right.title),
  ];
  const card = el("div", { class: "card", hidden: true });
  const drawing = svg(
    "svg",
    {
      width,
      height,
      class: "columns",
      onpointermove: (event: PointerEvent) => point(event),
      onpointerleave: () => (card.hidden = true),
    },
    svg("g", {}, ...paths),
    stripes,
    ...titles,
    ...words("left"),
    ...words("right"),
  );
  /** Say what the link under the pointer is. */
  const point = ({ clientX, clientY }: PointerEvent): void => {
    const box = drawing.getBoundingClientRect();
    const share = (clientX - box.left - start) / (end - start);
    const found = share > 0 && share < 1 ? nearest(share, clientY - box.top) : null;
    card.hidden = !found?.about;
    if (!found) return;
    if (!card.isConnected) drawing.after(card);
    const [left, right] = [sides.left.words[found.left], sides.right.words[found.right]];
    const pair = `${short(left, LETTERS)} ${sides.left.first + found.left} → ${short(right, LETTERS)} ${sides.right.first + found.right}`;
    card.replaceChildren(el("p", {}, el("bdi", { class: "token" }, pair)), el("p", { class: "value" }, found.about));
    card.style.left = `${Math.min(clientX + 18, innerWidth - card.offsetWidth - 12)}px`;
    card.style.top = `${Math.min(clientY + 18, innerHeight - card.offsetHeight - 8)}px`;
  };
  /** The link that passes nearest to a height, the stronger of two; null where none is near. */
  const nearest = (share: number, height: number): Link | null => {
    const t = along(share);
    const rise = t * t * (3 - 2 * t);
    let [best, least]: [Link | null, number] = [null, NEAR];
    drawn.forEach((link, at) => {
      const away = Math.abs(y(link.left) + (y(link.right) - y(link.left)) * rise - height);
      if (away <= least && !paths[at].classList.contains("hidden")) [best, least] = [link, away];
    });
    return best;
  };
  /** The parameter of a curve at a share of its width. */
  const along = (share: number): number => {
    const bend = ((to - from) * 0.42) / (end - start);
    let [low, high] = [0, 1];
    for (let step = 0; step < 30; step++) {
      const t = (low + high) / 2;
      const x = 3 * (1 - t) ** 2 * t * bend + 3 * (1 - t) * t ** 2 * (1 - bend) + t ** 3;
      if (x < share) low = t;
      else high = t;
    }
    return (low + high) / 2;
  };
  return drawing;
}

/** A bar as long as the share that goes elsewhere. */
function mark(share: number, x: number, y: number): SVGElement {
  const high = (LINE - 4) * Math.min(1, share);
  const percent = `${Math.round(100 * share)} % goes to keys outside of this window`;
  return svg(
    "rect",
    { x, y: y + (LINE - 4) / 2 - high, width: 4, height: high, class: "outside", "data-share": share.toFixed(4) },
    svg("title", {}, percent),
  );
}

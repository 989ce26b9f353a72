// A ranking: tokens by weight, the strongest first, each a step to follow.

import { digits } from "./certainty";
import { el } from "./element";
import { short } from "./glyphs";
import { number } from "./legend";

export interface Ranked {
  n: number;
  text: string;
  weight: number;
}

/** A list of tokens by weight, each said with as many digits as are sure; `least` if a weight may be larger. */
export function ranking(items: Ranked[], follow: (n: number) => void, error = 0, least = false): HTMLElement {
  if (!items.length) return el("p", { class: "faint" }, "nothing");
  const rows = items.map(({ n, text, weight }) => {
    const bar = el("i");
    bar.style.width = `${(100 * weight) / items[0].weight}%`;
    const parts = [
      el("bdi", { class: "token" }, short(text, 24)),
      el("span", { class: "faint" }, n),
      el("span", { class: "meter" }, bar),
      el("span", { class: "number" }, (least ? "≥ " : "") + number(weight, digits(error, 3))),
    ];
    return el("li", {}, el("button", { type: "button", "data-n": n, onclick: () => follow(n) }, ...parts));
  });
  return el("ol", {}, ...rows);
}

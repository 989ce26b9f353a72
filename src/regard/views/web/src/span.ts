// Spans of tokens: as they are drawn in running text, and as words or sentences widen them.

import { el } from "./element";
import { pieces, visible } from "./glyphs";
import type { Token } from "./marks";
import type { Grouping, Range } from "./source";

/** A token as an element: text as text, escapes set apart. */
export function tokenElement(token: Token, n: number): HTMLElement {
  const parts = pieces(token.text).map((piece) =>
    piece.escape ? el("span", { class: "escape" }, piece.text) : piece.text,
  );
  return el("span", { class: "tok", "data-n": n, role: "option" }, el("bdi", {}, ...parts));
}

/** A range of tokens in words. */
export function phrase(tokens: Token[] | null, first: number, last: number, most = 12): string {
  if (!tokens) return first === last ? `token ${first}` : `tokens ${first} to ${last}`;
  const shown = tokens.slice(first, Math.min(last + 1, first + most));
  const text = shown.map((token, n) => (token.gap && n ? " " : "") + visible(token.text)).join("");
  return last - first >= most ? `${text} …` : text;
}

/** How many of some tokens are none of the padding. */
export function counted(padding: Range[], first: number, last: number): number {
  const hidden = padding.map(([from, to]) => Math.max(0, Math.min(last, to) - Math.max(first, from) + 1));
  return last - first + 1 - hidden.reduce((sum, count) => sum + count, 0);
}

/** The whole groups that a range of tokens touches. */
export function widened(groups: Grouping | null, first: number, last: number): [number, number] {
  if (!groups) return [first, last];
  const { ids } = groups;
  while (first > 0 && ids[first - 1] === ids[first]) first--;
  while (last < ids.length - 1 && ids[last + 1] === ids[last]) last++;
  return [first, last];
}

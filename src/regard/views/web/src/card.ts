// The card beside the pointer: which pair of tokens, or of ranges of tokens, is there, and its weight.

import { digits, said } from "./certainty";
import { el, fill } from "./element";
import { number } from "./legend";
import type { Token } from "./marks";
import { phrase } from "./span";
import type { Cell } from "./tiles";

/** One side of a pair: its tokens, how many there are, and the position of the first. */
export interface Side {
  name: string;
  tokens: Token[] | null;
  count: number;
  offset: number;
}

/** What one map has at the pair. */
export interface Value {
  label: string;
  cell: Cell;
  signed: boolean;
}

export class Card {
  readonly element = el("div", { class: "card", hidden: true });

  hide(): void {
    this.element.hidden = true;
  }

  /** Everything on it in one line. */
  words(): string {
    const parts = (one: Element): string => [...one.childNodes].map(({ textContent }) => textContent).join(" ");
    const pairs = [...this.element.querySelectorAll("dt")].map((name) => `${name.textContent} ${parts(name.nextElementSibling!)}`);
    return [...pairs, ...[...this.element.querySelectorAll("p")].map(parts)].join(", ");
  }

  show(x: number, y: number, cell: Cell, sides: [Side, Side], values: Value[], more: string): void {
    const { element } = this;
    element.hidden = false;
    const width = 2 ** cell.level;
    const pair = [...tokens(sides[0], cell.row, width), ...tokens(sides[1], cell.col, width)];
    fill(element, el("dl", {}, ...pair), ...values.map(weight), more ? el("p", { class: "faint" }, more) : null);
    const { offsetWidth, offsetHeight } = element;
    const below = y + 18 + offsetHeight <= innerHeight - 8;
    element.style.left = `${Math.max(8, Math.min(x + 18, innerWidth - offsetWidth - 12))}px`;
    element.style.top = `${below ? y + 18 : Math.max(8, y - offsetHeight - 14)}px`;
  }
}

function tokens({ name, tokens, count, offset }: Side, at: number, width: number): Node[] {
  const first = Math.floor(at / width) * width;
  const last = Math.min(first + width, count) - 1;
  const numbers = first === last ? `${first + offset}` : `${first + offset}–${last + offset}`;
  const text = tokens && el("bdi", { class: "token" }, phrase(tokens, first, last));
  return [el("dt", {}, name), el("dd", {}, text, el("span", { class: "faint" }, numbers))];
}

function weight({ label, cell, signed }: Value): HTMLElement {
  const { value, largest, level, certainty } = cell;
  if (Number.isNaN(value)) return el("p", { class: "value faint", "data-weight": "NaN" }, `${label} –`);
  if (value === null) return el("p", { class: "value faint" }, `${label} …`);
  const sign = signed && value > 0 ? "+" : "";
  const sure = digits(certainty?.error ?? 0);
  const most = level > 0 && largest !== null ? `, largest ${number(largest, sure)}` : "";
  const text = [label, level > 0 ? "mean" : "", sign + number(value, sure) + most].filter(Boolean).join(" ");
  const known = certainty && said(certainty);
  const badge = known ? el("span", { class: "badge" }, known) : null;
  return el("p", { class: "value", "data-weight": value }, text, badge);
}

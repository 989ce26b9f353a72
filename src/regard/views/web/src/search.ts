// Search: words and phrases in a text of tokens, and tokens by number.

import type { Token } from "./marks";

/** Ranges of tokens, first and last, that hold a phrase; `#120` is token 120. */
export function matches(tokens: Token[], phrase: string): [number, number][] {
  const number = /^#(\d+)$/.exec(phrase.trim());
  if (number) return Number(number[1]) < tokens.length ? [[Number(number[1]), Number(number[1])]] : [];
  const wanted = phrase.toLowerCase();
  if (!wanted.trim()) return [];
  const starts: number[] = [];
  let text = "";
  for (const token of tokens) {
    if (token.gap && text) text += " ";
    starts.push(text.length);
    text += token.text.toLowerCase();
  }
  const found: [number, number][] = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    const [first, last] = [holding(starts, at), holding(starts, at + wanted.length - 1)];
    if (found[found.length - 1]?.[0] !== first) found.push([first, last]);
  }
  return found;
}

/** The last token that starts at or before a character. */
function holding(starts: number[], at: number): number {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (starts[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

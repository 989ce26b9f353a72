// Alignment of two texts of different lengths: which token of one is which of the other, and what lies beside what.

import type { Aligned, Run } from "./source";

/** The token of the other text that a token is; null where it has none. */
export function partner(runs: Run[], n: number): number | null {
  const run = runs.find(([first, , count]) => n >= first && n < first + count);
  return run ? n - run[0] + run[1] : null;
}

/** The pair of the other text that a pair of tokens is; null where one of them has none. */
export function pairOf({ queries, keys }: Aligned, at: { row: number; col: number }): { row: number; col: number } | null {
  const [row, col] = [partner(queries, at.row), partner(keys, at.col)];
  return row === null || col === null ? null : { row, col };
}

/** The part of the other map that lies beside a part of this one, at the same scale. */
export function beside<T extends { row: number; col: number }>({ queries, keys }: Aligned, window: T): T {
  return { ...window, row: place(queries, window.row), col: place(keys, window.col) };
}

/** The same seen from the other text. */
export function turned({ queries, keys }: Aligned): Aligned {
  const swap = (runs: Run[]): Run[] => runs.map(([one, other, count]) => [other, one, count]);
  return { queries: swap(queries), keys: swap(keys) };
}

/** A place along one text in tokens of the other; what has no partner is spread between its neighbours. */
function place(runs: Run[], at: number): number {
  let [one, other] = [0, 0];
  for (const [first, second, count] of runs) {
    if (at < first) return other + ((at - one) * (second - other)) / (first - one);
    if (at <= first + count) return second + at - first;
    [one, other] = [first + count, second + count];
  }
  return other + at - one;
}

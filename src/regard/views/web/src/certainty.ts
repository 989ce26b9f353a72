// Certainty: how far the numbers of an answer can be trusted, in one form for cards, legends, tables and files.

export type State = "exact" | "pooled" | "sampled" | "partial";

export interface Certainty {
  /** Exact but for the error; from the means of larger cells; from some queries; or at least this much. */
  state: State;
  /** The largest relative error of how the numbers are coded. */
  error: number;
  /** Seconds until asking again pays; null where nothing better will come. */
  retry: number | null;
  /** How many queries of how many were sampled, or how many links of each token are held. */
  of: [number, number] | null;
}

export const EXACT: Certainty = { state: "exact", error: 0, retry: null, of: null };

const ORDER: State[] = ["exact", "partial", "pooled", "sampled"];

/** What is true of several answers together: the least certain state, the largest error. */
export function together(parts: Certainty[]): Certainty {
  return parts.reduce(
    (one, other) => ({
      ...(ORDER.indexOf(other.state) > ORDER.indexOf(one.state) ? other : one),
      error: Math.max(one.error, other.error),
      retry: one.retry ?? other.retry,
    }),
    EXACT,
  );
}

/** In words, nothing where the numbers are exact to their digits. */
export function said({ state, error, retry, of }: Certainty): string {
  const soon = retry === null ? "" : "; exact numbers follow";
  if (state === "sampled") return (of ? `from ${grouped(of[0])} of ${grouped(of[1])} queries` : "from some queries") + soon;
  if (state === "pooled") return `from the means of larger cells${soon}`;
  if (state === "partial") return of ? `only the ${of[0]} strongest links of each token are held` : "not all links are held";
  return within(error).trim();
}

/** How far numbers may be off, in words; nothing where that is less than their digits say. */
export function within(error: number): string {
  return error >= 0.005 ? ` to within ${Math.round(100 * error)} %` : "";
}

/** How many digits of a number are sure, at most so many. */
export function digits(error: number, most = 4): number {
  return error > 0 ? Math.max(1, Math.min(most, Math.ceil(-Math.log10(2 * error)))) : most;
}

/** The columns of every table, and what they hold for an answer. */
export const COLUMNS = ["state", "relative error"];

export function fields({ state, error, of }: Certainty): [string, string] {
  return [of && state === "sampled" ? `${state}: ${of[0]} of ${of[1]} queries` : state, String(error)];
}

function grouped(count: number): string {
  return count.toLocaleString("en");
}

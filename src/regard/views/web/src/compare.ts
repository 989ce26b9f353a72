// Compare: the heads of two captures ranked by how much they differ, under the edits that lead from one text to the other.

import { type App, layerNames, type View, words } from "./app";
import { menu, notice } from "./controls";
import { type Child, el, fill } from "./element";
import { mark, number } from "./legend";
import type { Token } from "./marks";
import type { Aligned, ComparedHead } from "./source";
import { phrase } from "./span";
import type { State } from "./state";

const AT_A_TIME = 100; // rows of the table
const LONG = 96; // tokens from which on the map opens at the largest difference
const FAR = 48; // tokens across then
const MOST_EDITS = 60; // shown of a text
const SIGHT = 4; // kept words around an edit

/** The differences by which heads are ranked, and what each is, after "mean" and before "over". */
const MEASURES = { difference: "difference", js: "Jensen-Shannon", kl: "Kullback-Leibler", mse: "squared difference" };
type Measure = keyof typeof MEASURES;
const MEANINGS: Record<Measure, string> = {
  difference: "mean size of A − B over all pairs of tokens that both texts have",
  js: "mean Jensen-Shannon divergence of the rows of A and B, in nats: 0 if equal, at most 0.693",
  kl: "mean Kullback-Leibler divergence of the rows of B from those of A, in nats",
  mse: "mean square of A − B over all pairs of tokens that both texts have",
};

/** A stretch of two texts: the same in both, or what the one has in place of the other's. */
interface Stretch {
  ours: [first: number, stop: number];
  theirs: [first: number, stop: number];
  same: boolean;
}

export class CompareView implements View {
  private readonly body = el("div", { class: "compare", tabindex: 0, role: "region", "aria-label": "comparison" });
  private rows: ComparedHead[] = [];
  private tokens: [Token[] | null, Token[] | null] = [null, null];
  private asked = "";
  private most = AT_A_TIME;
  private by: Measure = "difference";

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    fill(host, this.body);
  }

  update(state: State): void {
    const key = String(state.batch);
    if (key === this.asked) return;
    this.asked = key;
    fill(this.body, notice("comparing the heads …"));
    this.show(key).catch((error: unknown) => {
      const text = words(error);
      if (text && key === this.asked) fill(this.body, notice(text));
    });
  }

  close(): void {
    this.asked = "closed";
  }

  table(): string[][] {
    const named = ["largest difference", "query", "key", "query of B", "key of B"];
    const head = ["layer", "head", "difference", "js", "kl", "mse", ...named, "to tokens of A alone", "to tokens of B alone"];
    const { layers } = this.app.session.captures[0];
    const rows = this.rows.map((row) => [
      layers[row.layer].name,
      String(layers[row.layer].heads[row.head]),
      ...[row.difference, row.js, row.kl === null ? "inf" : row.kl, row.mse],
      ...[row.largest, row.query, row.key, row.other_query, row.other_key, row.unaligned, row.other_unaligned],
    ]);
    return [head, ...rows.map((row) => row.map((value) => String(value ?? "")))];
  }

  private async show(key: string): Promise<void> {
    const { source, state } = this.app;
    const { batch } = state;
    const all = await source.comparison();
    this.rows = ranked(
      all.filter((row) => row.batch === batch),
      this.by,
    );
    const first = [...this.rows].sort((a, b) => a.layer - b.layer)[0];
    if (!first) return fill(this.body, notice("The captures have no heads to compare."));
    const place = { capture: 0, layer: first.layer, batch };
    const other = { capture: 1, layer: first.other, batch };
    const [aligned, ours, theirs] = await Promise.all([
      source.aligned(place),
      this.app.tokens(place, "query"),
      this.app.tokens(other, "query"),
    ]);
    if (key !== this.asked) return;
    this.tokens = [ours, theirs];
    this.draw(ours && theirs ? stretches(aligned, ours, theirs) : null);
  }

  private draw(parts: Stretch[] | null): void {
    const [a, b] = this.app.session.captures;
    const names = el("p", { class: "hint" }, el("b", {}, "A"), ` ${a.name}, `, el("b", {}, "B"), ` ${b.name}`);
    const known = parts && el("p", { class: "edits" }, ...this.edits(parts));
    const marks = el(
      "p",
      { class: "marks legend-label" },
      mark("meter", `${MEANINGS[this.by]}; the table is in this order`),
    );
    const choice = menu("rank by", MEASURES, this.by, (by) => {
      this.by = by;
      this.rows = ranked(this.rows, by);
      this.draw(parts);
      this.body.querySelector<HTMLElement>("[data-control='rank by']")?.focus();
    });
    fill(this.body, el("h2", {}, "Heads by how much they differ"), names, known, choice, marks, this.list());
  }

  /** The texts as one: words of A alone struck out, words of B alone underlined. */
  private edits(parts: Stretch[]): Child[] {
    const [ours, theirs] = this.tokens;
    if (parts.every(({ same }) => same)) return ["Both texts are the same."];
    const shown = parts.slice(0, 2 * MOST_EDITS + 1).flatMap(({ ours: own, theirs: other, same }, n): Child[] => {
      if (!same) {
        const gone = own[1] > own[0] && el("del", { title: "in A alone" }, phrase(ours, own[0], own[1] - 1));
        const come = other[1] > other[0] && el("ins", { title: "in B alone" }, phrase(theirs, other[0], other[1] - 1));
        return [gone, gone && come && " ", come];
      }
      const [first, last] = [own[0], own[1] - 1];
      const edge = { start: n > 0, end: n < parts.length - 1 };
      if (last - first < 2 * SIGHT + 2) return [phrase(ours, first, last, 2 * SIGHT + 3)];
      return [
        edge.start ? phrase(ours, first, first + SIGHT - 1) : "",
        " … ",
        edge.end ? phrase(ours, last - SIGHT + 1, last) : "",
      ];
    });
    return [...shown.flatMap((part) => [part, " "]), parts.length > 2 * MOST_EDITS + 1 && "…"];
  }

  private list(): HTMLElement {
    const titles = ["layer", "head", MEASURES[this.by], "largest difference", "A: on words of A alone", "B: on words of B alone"];
    const head = el("tr", {}, ...titles.map((title, n) => el("th", { scope: "col", colspan: n === 2 ? 2 : null }, title)));
    const names = layerNames(this.app.session.captures[0].layers);
    const most = Math.max(...this.rows.map((row) => row[this.by] ?? 0)) || 1;
    const rows = this.rows.slice(0, this.most).map((row) => this.row(row, names[row.layer], most));
    const left = this.rows.length - rows.length;
    const more = (): void => {
      this.most += AT_A_TIME;
      table.replaceWith(this.list());
    };
    const button = left > 0 && el("button", { type: "button", class: "plain", onclick: more }, `show more, ${left} are left`);
    const table = el("div", { class: "ranked" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)), button);
    return table;
  }

  private row(row: ComparedHead, name: string, most: number): HTMLElement {
    const { largest, query, key, unaligned, other_unaligned } = row;
    const value = row[this.by];
    const head = this.app.session.captures[0].layers[row.layer].heads[row.head];
    const bar = el("i");
    bar.style.width = `${value === null ? 100 : (100 * (value ?? 0)) / most}%`;
    const share = (value: number | undefined): string => (value === undefined ? "" : `${(100 * value).toFixed(1)} %`);
    const place = query === undefined || key === undefined ? "" : this.pair(row);
    const sign = (largest ?? 0) > 0 ? "+" : "";
    const open = (): void => this.open(row);
    const button = el(
      "button",
      { type: "button", class: "open", onclick: open, title: "open both maps", "aria-label": `open layer ${name}, head ${head}` },
      name,
    );
    return el(
      "tr",
      { onclick: (event: MouseEvent) => event.target instanceof HTMLButtonElement || open() },
      el("td", {}, button),
      el("td", {}, head),
      el("td", { class: "number" }, value === undefined ? "no common words" : value === null ? "infinite" : number(value, 3)),
      el("td", {}, el("span", { class: "meter" }, bar)),
      el("td", {}, largest === undefined ? "" : el("span", { class: "number" }, sign + number(largest, 3)), " ", place),
      el("td", { class: "number" }, share(unaligned)),
      el("td", { class: "number" }, share(other_unaligned)),
    );
  }

  /** The pair of the largest difference, in the words of both. */
  private pair({ query, key, other_query, other_key, layer, other }: ComparedHead): HTMLElement {
    const say = (tokens: Token[] | null, n: number): string => phrase(tokens, n, n);
    const [ours, theirs] = this.tokens;
    const [own, with_] = [this.app.session.captures[0].layers[layer], this.app.session.captures[1].layers[other]];
    if (!own.self || !with_.self || !ours || !theirs) return el("span", { class: "faint" }, `${query} → ${key}`);
    const both = (n: number, m: number): string => {
      const [a, b] = [say(ours, n), say(theirs, m)];
      return a === b ? a : `${a} | ${b}`;
    };
    return el("bdi", { class: "faint" }, `${both(query!, other_query!)} → ${both(key! - own.offset, other_key! - with_.offset)}`);
  }

  private open({ layer, head, query, key }: ComparedHead): void {
    const { n_i, n_j } = this.app.session.captures[0].layers[layer];
    const far = Math.max(n_i, n_j) > LONG && query !== undefined && key !== undefined;
    this.app.go({
      view: "map",
      capture: 0,
      layer,
      head,
      against: "capture",
      layout: "beside",
      at: far ? [query + 0.5, key + 0.5, FAR] : null,
      chosen: query === undefined ? null : [query, query],
      axis: "query",
    });
  }
}

/** The rows by one difference, the largest first; infinite ones before all, those without a number last. */
function ranked(rows: ComparedHead[], by: Measure): ComparedHead[] {
  const size = (row: ComparedHead): number => (row[by] === null ? Infinity : (row[by] ?? -1));
  return [...rows].sort((a, b) => (size(a) === size(b) ? 0 : size(b) - size(a)));
}

/** What two texts have in common and what each has alone, in order; a token in place of another is of each alone. */
function stretches({ queries }: Aligned, ours: Token[], theirs: Token[]): Stretch[] {
  const found: Stretch[] = [];
  let [one, other] = [0, 0];
  const upTo = (first: number, second: number, same: boolean): void => {
    const last = found[found.length - 1];
    if (last?.same === same) [last.ours[1], last.theirs[1]] = [first, second];
    else if (first > one || second > other) found.push({ ours: [one, first], theirs: [other, second], same });
    [one, other] = [first, second];
  };
  for (const [first, second, count] of queries) {
    upTo(first, second, false);
    for (let n = 0; n < count; n++)
      upTo(first + n + 1, second + n + 1, ours[first + n].raw === theirs[second + n].raw);
  }
  upTo(ours.length, theirs.length, false);
  return found;
}

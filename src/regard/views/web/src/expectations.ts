// Expectations: how probable a language model found each token, and which tokens it expected there.

import { el } from "./element";
import { short, visible } from "./glyphs";
import { number } from "./legend";
import { readable, type Token } from "./marks";
import type { Predictions } from "./source";

/** −log p at which a mark is strongest: a probability of one in 22,000. */
const MOST = 10;
const DIGITS = 3;

export class Expectations {
  private readonly names: Token[];

  constructor(
    private readonly predictions: Predictions,
    private readonly tokens: Token[],
  ) {
    this.names = readable(predictions.names);
  }

  /** How strong the mark of a token is: the less probable, the stronger; not a number where that is not known. */
  readonly mark = (n: number): number => Math.min(1, -this.predictions.logProbability[n] / MOST);

  /** The whole text in numbers, and what its marks mean. */
  ofText(): HTMLElement {
    const { sum, count } = this.sum(0, this.tokens.length - 1);
    return el(
      "section",
      { "data-side": "predictions" },
      el("h3", {}, "predictions"),
      this.legend(),
      el("p", {}, `log-probability of the text ${number(sum, 4)}, ${count} tokens; perplexity ${number(Math.exp(-sum / count), DIGITS)}`),
      this.next(),
    );
  }

  /** What was expected at a token and behind it, or at the first of several. */
  ofSpan(first: number, last: number): HTMLElement {
    const several = last > first;
    return el(
      "section",
      { "data-side": "predictions" },
      el("h3", {}, several ? "expected at the first of them" : "expected here, from the tokens before"),
      this.list(first, true),
      !several && last + 1 <= this.tokens.length ? el("h3", {}, "expected next") : null,
      several ? null : this.list(last + 1, last + 1 < this.tokens.length),
      this.legend(),
    );
  }

  table(): string[][] {
    const { logProbability, expected } = this.predictions;
    const rows = [["position", "token", "log-probability", "most probable", "its log-probability"]];
    for (const n of logProbability.keys()) {
      const [best] = expected(n);
      const most = best ? [this.names[best.name].raw, String(best.logProbability)] : ["", ""];
      rows.push([String(n), this.tokens[n]?.raw ?? "", Number.isNaN(logProbability[n]) ? "" : String(logProbability[n]), ...most]);
    }
    return rows;
  }

  private sum(first: number, last: number): { sum: number; count: number } {
    const known = [...this.predictions.logProbability.subarray(first, last + 1)].filter((value) => !Number.isNaN(value));
    return { sum: known.reduce((sum, value) => sum + value, 0), count: known.length };
  }

  /** What is expected behind the last token that is known. */
  private next(): HTMLElement | null {
    const places = [...this.predictions.logProbability.keys()].filter((n) => this.predictions.expected(n).length);
    const last = places.pop();
    return last === undefined ? null : el("div", {}, el("h3", {}, "expected after the text"), this.list(last, false));
  }

  /** The tokens expected at a place with their probabilities, and the one that stands there. */
  private list(n: number, stands: boolean): HTMLElement {
    const best = this.predictions.expected(n);
    if (!best.length) return el("p", { class: "faint" }, "nothing stands before it");
    const own = this.predictions.logProbability[n];
    const known = stands && !Number.isNaN(own);
    // The model's names of tokens may be written otherwise than those of the text: the same number is the same token.
    const items = best.map(({ name, logProbability }) => ({ token: this.names[name], logProbability, own: known && logProbability === own }));
    const found = items.some(({ own }) => own);
    if (known && !found) items.push({ token: this.tokens[n], logProbability: own, own: true });
    const texts = items.map(({ token }) => token.text);
    const rows = items.map(({ token, logProbability, own }) => {
      const p = Math.exp(logProbability);
      const bar = el("i");
      bar.style.width = `${100 * p}%`;
      const twin = texts.filter((text) => text === token.text).length > 1 && token.gap ? "␣" : "";
      return el(
        "li",
        { class: own ? "own" : null },
        el("bdi", { class: "token" }, twin + short(visible(token.text), 24)),
        el("span", { class: "meter" }, bar),
        el("span", { class: "number", "data-p": p }, number(p, DIGITS)),
      );
    });
    const note = known && el("p", { class: "faint" }, "in colour: the token that stands here", found ? "" : ", beyond the most probable ones");
    return el("div", { class: "expected" }, el("ol", {}, ...rows), note);
  }

  /** How probable a token, or all of some, was, in a line. */
  brief(first: number, last: number): HTMLElement | null {
    if (last > first) {
      const { sum, count } = this.sum(first, last);
      if (!count) return null;
      const part = count <= last - first ? ` of the ${count} with a prediction` : "";
      return el("p", { class: "hint", "data-sum": sum }, `log-probability ${number(sum, 4)}${part}, probability ${number(Math.exp(sum), DIGITS)}`);
    }
    const n = first;
    const own = this.predictions.logProbability[n];
    const [best] = this.predictions.expected(n);
    if (Number.isNaN(own) || !best) return null;
    const expected = visible(this.names[best.name].text);
    return el("p", { class: "hint" }, `probability ${number(Math.exp(own), DIGITS)}; expected: `, el("bdi", {}, short(expected, 24)), ` ${number(Math.exp(best.logProbability), DIGITS)}`);
  }

  private legend(): HTMLElement {
    return el(
      "div",
      { class: "hint surprise-key" },
      el("span", {}, "line below a word: its probability from the words before"),
      el("span", {}, "1"),
      el("i"),
      el("span", {}, `≤ ${number(Math.exp(-MOST), 1)}`),
    );
  }
}

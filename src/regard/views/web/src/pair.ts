// Pair: one weight step by step, the products by dimension as bars, then sum, scale, bias, mask and softmax.

import { type App, headName, words } from "./app";
import { button, notice } from "./controls";
import { el, fill, svg } from "./element";
import { number } from "./legend";
import { phrase } from "./span";
import type { PairSteps } from "./source";

const [WIDTH, HEIGHT] = [288, 110]; // of the bars

export class PairPanel {
  readonly element = el("aside", { class: "pair", "aria-label": "pair", hidden: true });
  private asked = "";
  private stop = new AbortController();

  constructor(private readonly app: App) {}

  async show(pair: [number, number] | null): Promise<void> {
    const { place, state } = this.app;
    const key = pair ? JSON.stringify([place, state.head, pair]) : "";
    if (key === this.asked) return;
    this.asked = key;
    this.stop.abort();
    this.stop = new AbortController();
    this.element.hidden = !pair;
    if (!pair) return fill(this.element);
    const { signal } = this.stop;
    const [row, col] = pair;
    try {
      this.app.mustHaveWeights();
      const [left, top] = await Promise.all([this.app.tokens(place, "query"), this.app.tokens(place, "key")]);
      if (signal.aborted) return;
      const head = this.head([phrase(left, row, row), phrase(top, col, col)], pair);
      if (!this.element.childElementCount) fill(this.element, head);
      const steps = await this.app.source.pair(place, state.head, row, col, signal).catch((error: unknown) => {
        if (!signal.aborted) fill(this.element, head, notice(words(error) ?? ""));
        return null;
      });
      if (steps && !signal.aborted) fill(this.element, head, ...bars(steps), list(steps));
    } catch (error) {
      if (!signal.aborted) fill(this.element, notice(words(error) ?? ""));
    }
  }

  private head([query, key]: [string, string], [row, col]: [number, number]): HTMLElement {
    const { layer, state } = this.app;
    const { self, offset } = layer;
    const side = (text: string, n: number): Node[] => [el("bdi", { class: "token" }, text), el("span", { class: "faint" }, ` ${n}`)];
    return el(
      "header",
      {},
      el("h2", {}, ...side(query, row + (self ? offset : 0)), " → ", ...side(key, col)),
      button("close", () => this.app.go({ pair: null }), "×"),
      el("p", { class: "faint" }, `${layer.name}, ${headName(layer, state.head)}`),
    );
  }
}

/** The terms of the score by dimension: up where they add to it, down where they take from it. */
function bars({ terms, formula, q, k }: PairSteps): HTMLElement[] {
  if (!terms) return [el("p", { class: "hint" }, "This score is no sum over dimensions: there are no products to show.")];
  const values = terms.map((term) => term ?? 0);
  const most = Math.max(1e-30, ...values.map(Math.abs));
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  const y = (value: number): number => 4 + ((HEIGHT - 8) * (high - value)) / Math.max(high - low, 1e-30);
  const step = WIDTH / values.length;
  const rects = values.map((value, d) => {
    const about = `dimension ${d}: ${number(value)}, q ${number(q[d] ?? null)}, k ${number(k[d] ?? null)}`;
    return svg(
      "rect",
      {
        x: (d * step).toFixed(2),
        y: y(Math.max(value, 0)).toFixed(2),
        width: Math.max(0.6, step * 0.82).toFixed(2),
        height: Math.max(0.5, Math.abs(y(value) - y(0))).toFixed(2),
        class: value < 0 ? "less" : "more",
        "data-term": value,
      },
      svg("title", {}, about),
    );
  });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "products", role: "img", "aria-label": `${formula} by dimension` },
    svg("line", { x1: 0, x2: WIDTH, y1: y(0), y2: y(0), class: "zero" }),
    ...rects,
  );
  const strongest = values.map(Math.abs).indexOf(most);
  const largest = strongest < 0 ? "" : `; the largest is ${number(values[strongest])} at d = ${strongest}`;
  const about = `${formula} for d = 0 to ${values.length - 1}${largest}`;
  return [el("figure", {}, drawing as unknown as Node, el("figcaption", { class: "faint" }, about))];
}

/** From the sum to the weight, a line for each step. */
function list({ terms, scale, score, bias, total, visible, statistic, weight, slots }: PairSteps): HTMLElement {
  const sum = terms?.reduce<number>((all, term) => all + (term ?? 0), 0) ?? null;
  const product = sum === null ? null : sum * (scale ?? 1);
  const changed = product !== null && score !== null && Math.abs(product - score) > 1e-6 * Math.max(1, Math.abs(score));
  const normalize = slots["normalize"] ?? "";
  const softmax = /^(Softmax|SinkSoftmax)\(/.test(normalize);
  const row = (step: string, text: string, value: number | null, about = ""): Node[] => [
    el("dt", { title: about }, text),
    el("dd", { "data-step": step, "data-value": value }, value === null ? "−∞" : number(value, 5)),
  ];
  const lines: Node[] = [
    ...(sum === null ? [] : row("sum", "sum", sum)),
    ...(sum === null || scale === null ? [] : row("scaled", `× scale ${number(scale)}`, product)),
    ...(changed || sum === null ? row("score", sum === null ? "score" : "cap or function", score, slots["score"]) : []),
    ...(bias === null ? [] : row("bias", "+ bias", bias, slots["bias"])),
    ...(bias === null ? [] : row("total", "score", total)),
    ...(slots["mask"] ? [el("dt", { title: slots["mask"] }, "mask"), el("dd", { "data-step": "mask" }, visible ? "seen" : "hidden")] : []),
    ...(statistic === null ? [] : row("statistic", softmax ? "− log-sum-exp of the row" : `number of the row, ${normalize}`, statistic, normalize)),
    ...row("weight", softmax ? "exp: weight" : `${normalize}: weight`, visible ? weight : 0),
  ];
  return el("dl", { class: "steps" }, ...lines);
}

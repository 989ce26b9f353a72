// Text: the text itself; a token, a word, a sentence or any span of it, where that looks and who looks at it.

import { type App, type View, words } from "./app";
import { COLUMNS, fields, said, together } from "./certainty";
import { choice, notice, toggle } from "./controls";
import { el, fill } from "./element";
import { Expectations } from "./expectations";
import { CONTROLS } from "./glossary";
import * as hiding from "./hiding";
import { Legend } from "./legend";
import type { Token } from "./marks";
import { ranking } from "./ranking";
import { type Colouring, Running } from "./running";
import { matches } from "./search";
import type { Axis, Grouping, Links } from "./source";
import { counted, phrase, widened } from "./span";
import type { State, Unit } from "./state";

const LONGEST = 512; // tokens of a span
const LISTED = 14; // links a side
const NARROW = 140; // pixels of the legend
const UNITS: Record<Unit, string> = { token: "token", words: "word", sentences: "sentence" };
const SIDES: Record<Axis, string> = { query: "looks at", key: "is seen by" };
const HINT =
  "Choose a token: where it looks, and who looks at it, is coloured in the text and listed here. " +
  "Drag, or click with shift, to choose a span.";

export class TextView implements View {
  readonly keys: Record<string, () => void> = {
    ArrowLeft: () => this.step(-1),
    ArrowRight: () => this.step(1),
    ArrowUp: () => this.step(-10),
    ArrowDown: () => this.step(10),
    Enter: () => this.side.querySelector<HTMLElement>(`section[data-side="${this.app.state.axis}"] button`)?.click(),
  };
  private readonly pages = el("div", { class: "pages" });
  private readonly side = el("aside", { class: "links", "aria-label": "strongest links", tabindex: 0 });
  private readonly legend = new Legend(NARROW);
  /** One text where queries and keys are the same tokens, under "query"; else two. */
  private texts: Partial<Record<Axis, Running>> = {};
  private links: Partial<Record<Axis, Links>> = {};
  /** Sides that are waited for, under null, or were refused, with the reason. */
  private missing: Partial<Record<Axis, string | null>> = {};
  private stop = new AbortController();
  /** What the model expected of the queries; null without predictions. */
  private expectations: Expectations | null = null;
  private opened = "";
  private asked = "";
  /** What is hidden, in words, and which of the keys that are. */
  private hidden = "";
  private hiddenKeys: Uint8Array = new Uint8Array(0);

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    fill(host, el("div", { class: "text" }, this.pages, this.side));
  }

  update(state: State): void {
    void this.show(state).catch((error: unknown) => {
      const text = words(error);
      if (text) fill(this.side, notice(text));
    });
  }

  close(): void {
    this.stop.abort();
    for (const text of Object.values(this.texts)) text.close();
  }

  tools(): Node[] {
    return [
      choice("choose by", UNITS, this.app.state.unit, (unit) => void this.rechoose(unit)),
      hiding.tools(this.app),
      ...(this.app.layer.predictions === null ? [] : [this.predictionTool()]),
    ];
  }

  private predictionTool(): HTMLElement {
    const shown = this.app.state.predictions === "shown";
    return toggle("predictions", "marked", CONTROLS.predictions, shown, () =>
      this.app.go({ predictions: shown ? "hidden" : "shown" }),
    );
  }

  table(): string[][] {
    if (this.expectations && !this.app.state.chosen) return this.expectations.table();
    const rows = [["side", "position", "token", "weight", ...COLUMNS]];
    for (const [side, links] of Object.entries(this.links) as [Axis, Links][]) {
      const tokens = this.tokens(opposite(side));
      links.weight.forEach((weight, n) => {
        if (weight > 0) rows.push([SIDES[side], String(n), tokens?.[n]?.raw ?? "", String(weight), ...fields(links)]);
      });
    }
    return rows;
  }

  private get one(): boolean {
    const { self, n_i, n_j } = this.app.layer;
    return self && n_i === n_j;
  }

  private running(axis: Axis): Running | undefined {
    return this.texts[axis] ?? this.texts.query;
  }

  private tokens(axis: Axis): Token[] | null {
    return this.running(axis)?.tokens ?? null;
  }

  private async show(state: State): Promise<void> {
    const { place, layer } = this.app;
    const texts = [layer.texts[state.batch], layer.n_i, layer.n_j, layer.self, layer.predictions];
    const key = JSON.stringify([...texts, state.capture, state.batch]);
    if (key !== this.opened) {
      this.opened = key;
      await this.open();
      if (this.opened !== key) return;
    }
    const ask = JSON.stringify([place, state.head, state.axis, state.chosen]);
    if (ask !== this.asked) {
      this.asked = ask;
      await this.readHidden();
      if (this.asked !== ask) return;
      this.ask(state);
    }
    this.paint();
    if (state.chosen) this.running(state.axis)?.reveal(state.chosen[0]);
  }

  private async open(): Promise<void> {
    const { place, layer } = this.app;
    const { predictions } = layer;
    const [left, top, expected] = await Promise.all([
      this.app.tokens(place, "query"),
      this.app.tokens(place, "key"),
      predictions === null ? null : this.app.source.predictions(place.capture, predictions, place.batch),
    ]);
    this.expectations = expected && new Expectations(expected, left ?? numbered(layer.n_i));
    for (const text of Object.values(this.texts)) text.close();
    const made = (axis: Axis, title: string, tokens: Token[]): Running =>
      new Running(title, tokens, (first, last) => void this.choose(axis, first, last));
    this.texts = this.one
      ? { query: made("query", "", left ?? numbered(layer.n_i)) }
      : {
          query: made("query", "queries", left ?? numbered(layer.n_i)),
          key: made("key", "keys", top ?? numbered(layer.n_j)),
        };
    fill(this.pages, ...Object.values(this.texts).map((text) => text.element));
  }

  /** Ask for both sides; each is shown when it is there, for one may take much longer than the other. */
  private ask(state: State): void {
    this.stop.abort();
    this.stop = new AbortController();
    [this.links, this.missing] = [{}, {}];
    if (!state.chosen) return this.list();
    this.app.mustHaveWeights();
    const { signal } = this.stop;
    const [first, last] = [state.chosen[0], Math.min(state.chosen[1], state.chosen[0] + LONGEST - 1)];
    for (const side of this.sides()) {
      this.missing[side] = null;
      const asked = this.app.source.token(this.app.place, state.head, side, first, last, signal);
      const shown = asked.then(
        (links) => {
          this.links[side] = links;
          delete this.missing[side];
        },
        (error: unknown) => {
          this.missing[side] = words(error);
        },
      );
      void shown.then(() => {
        if (signal.aborted) return;
        this.list();
        this.paint();
      });
    }
    this.list();
  }

  private sides(): Axis[] {
    return this.one ? ["query", "key"] : [this.app.state.axis];
  }

  private async readHidden(): Promise<void> {
    const { place, layer } = this.app;
    this.hidden = await hiding.words(this.app, place);
    const known = place.hide ? await this.app.source.hidden(place) : null;
    this.hiddenKeys = known ? hiding.flags(place.hide!, known, layer.n_j) : new Uint8Array(0);
  }

  /** Colour each text by its links with what is chosen. */
  private paint(): void {
    const { axis, chosen, find } = this.app.state;
    const colouring = this.colouring(this.links[axis]);
    for (const [side, text] of Object.entries(this.texts) as [Axis, Running][]) {
      const asks = this.one || side === axis;
      const answers = this.one || side !== axis;
      const marked = side === "query" && this.app.state.predictions === "shown";
      text.marks = marked ? (this.expectations?.mark ?? null) : null;
      text.hidden = side === "key" || this.one ? this.hiddenKeys : null;
      text.paint(answers ? colouring : null, asks ? chosen : null, find && asks ? matches(text.tokens, find) : []);
    }
  }

  private colouring(links: Links | undefined): Colouring | null {
    const most = links?.weight.reduce((top, value) => Math.max(top, value || 0), 0);
    if (!links || !most) return null;
    const ramp = this.app.ramp(most);
    this.legend.draw(ramp, this.meaning(), false);
    return (n) => {
      const weight = links.weight[n];
      if (weight > 0) return [ramp.css(weight), ramp.ink(weight)];
      return Number.isNaN(weight) && links.state === "partial" ? ["", "var(--faint)"] : null;
    };
  }

  /** What the colours of the text are. */
  private meaning(): string {
    const { chosen, axis } = this.app.state;
    const several = chosen![1] > chosen![0];
    if (axis === "query") return several ? "mean weight from the chosen tokens to a word" : "weight from the chosen token to a word";
    return several ? "sum of the weights from a word to the chosen tokens" : "weight from a word to the chosen token";
  }

  private list(): void {
    const { chosen, axis } = this.app.state;
    const without = this.hidden && el("p", { class: "hint without" }, this.hidden);
    if (!chosen) return fill(this.side, el("p", { class: "hint" }, HINT), without, this.expectations?.ofText());
    const [first, last] = chosen;
    const place = el("span", { class: "faint" }, first === last ? ` ${first}` : ` ${first}–${last}`);
    const title = el("h2", {}, el("bdi", {}, phrase(this.tokens(axis), first, last)), place);
    const asks = axis === "query";
    const head = el("header", {}, title, asks && this.expectations?.brief(first, last));
    const sections = this.sides().map((side) => this.section(side));
    const colour = this.one && choice("colour by", SIDES, axis, (axis) => this.app.go({ axis }));
    const known = said(together(Object.values(this.links)));
    const legend = this.colouring(this.links[axis]) && this.legend.element;
    const faint = Object.values(this.links).some(({ state }) => state === "partial") ? "; words in grey are not known" : "";
    const expected = asks && this.expectations?.ofSpan(first, last);
    fill(this.side, head, without, colour, legend, ...sections, expected, known && el("p", { class: "hint known" }, `weights: ${known}${faint}`));
  }

  private section(side: Axis): HTMLElement {
    const links = this.links[side];
    if (!links) {
      const why = this.missing[side];
      const text = why ? notice(why) : el("p", { class: "faint" }, "computing …");
      return el("section", { "data-side": side }, el("h3", {}, SIDES[side]), text);
    }
    const tokens = this.tokens(opposite(side));
    const items = links.top
      .slice(0, LISTED)
      .map((n, at) => ({ n, text: tokens?.[n]?.text ?? "", weight: links.topWeight[at] }));
    const follow = (n: number): void =>
      this.app.go({ chosen: [n, n], axis: this.one ? this.app.state.axis : opposite(side) });
    const [first, last] = this.app.state.chosen!;
    const padding = this.app.layer.padding?.[this.app.state.batch][side === "query" ? 0 : 1] ?? [];
    const several = counted(padding, first, Math.min(last, first + LONGEST - 1));
    const { left } = links;
    if (side === "query" && several && !left) return el("section", { "data-side": side }, el("h3", {}, SIDES[side]), el("p", { class: "faint" }, "nothing is left of this row"));
    const rest = side === "query" && left < several ? `, nothing is left of ${several - left}` : "";
    const over = side === "query" ? `mean of ${left} queries${rest}` : `sum over ${several} keys`;
    const least = several > 1 && links.state === "partial";
    const title = el("h3", {}, several > 1 ? `${SIDES[side]}, ${over}` : SIDES[side]);
    const unsure = least && items.length < LISTED;
    const note = unsure ? el("p", { class: "faint" }, "The order of the others is not known from these links.") : null;
    return el("section", { "data-side": side }, title, items.length || !unsure ? ranking(items, follow, links.error, least) : null, note);
  }

  private async choose(side: Axis, first: number, last: number): Promise<void> {
    const chosen = widened(await this.groups(side, this.app.state.unit), first, last);
    this.app.go({ chosen, axis: this.one ? this.app.state.axis : side });
  }

  private async rechoose(unit: Unit): Promise<void> {
    const { chosen, axis } = this.app.state;
    const groups = await this.groups(axis, unit);
    this.app.go({ unit, chosen: chosen && widened(groups, chosen[0], unit === "token" ? chosen[0] : chosen[1]) });
  }

  private async step(by: number): Promise<void> {
    const { chosen, axis, unit } = this.app.state;
    const count = this.tokens(axis)?.length ?? 0;
    const next = !chosen ? 0 : by < 0 ? chosen[0] + by : chosen[1] + by;
    const n = Math.max(0, Math.min(count - 1, next));
    this.app.go({ chosen: widened(await this.groups(axis, unit), n, n) }, "slide");
  }

  private async groups(axis: Axis, unit: Unit): Promise<Grouping | null> {
    if (unit === "token") return null;
    return this.app.groups(this.app.place, axis, unit).catch(() => null); // what is asked next fails too, and says why
  }
}

function opposite(axis: Axis): Axis {
  return axis === "query" ? "key" : "query";
}

/** Numbers in place of tokens that the capture does not know. */
function numbered(count: number): Token[] {
  return Array.from({ length: count }, (_, n) => ({ raw: String(n), text: String(n), gap: true }));
}

// Lines: the classic two columns of tokens joined by every head, and all heads of all layers small, over a short range.

import { type App, layerNames, type View, words } from "./app";
import { COLUMNS, digits, fields, said } from "./certainty";
import { headColour } from "./colours";
import { columns, type Link } from "./columns";
import { button, choice, menu, named, notice } from "./controls";
import { el, fill, sized } from "./element";
import { short } from "./glyphs";
import * as hiding from "./hiding";
import { Legend, number } from "./legend";
import type { Token } from "./marks";
import type { Axis, Block, Grouping } from "./source";
import { phrase } from "./span";
import type { State } from "./state";

const COUNTS = [16, 32, 64, 128];
const LISTED = 50; // sentences of a menu
const FAINTEST = 0.02; // of the largest weight in the window

export class LinesView implements View {
  readonly keys: Record<string, () => void> = {
    ArrowUp: () => this.move(-1),
    ArrowDown: () => this.move(1),
  };
  private readonly body = el("div", { class: "lines" });
  private readonly legend = new Legend();
  private stop = new AbortController();
  private asked = "";
  private tokens: { left: Token[] | null; top: Token[] | null } = { left: null, top: null };
  private block: Block | null = null;
  /** What is hidden, in words. */
  private hidden = "";
  /** The sentences of queries and of keys. */
  private sentences: { left: Grouping | null; top: Grouping | null } = { left: null, top: null };

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    fill(host, this.body);
  }

  update(state: State): void {
    void this.show(state).catch((error: unknown) => {
      const text = words(error);
      if (text) fill(this.body, notice(text));
    });
  }

  close(): void {
    this.stop.abort();
  }

  tools(): Node[] {
    const { state, layer } = this.app;
    const { row, rows, col, cols } = this.window();
    const [queries, keys] = [`${row}–${row + rows - 1}`, `${col}–${col + cols - 1}`];
    const range = queries === keys ? queries : `${queries} × ${keys}`;
    const count = String(COUNTS.find((n) => n >= Math.max(rows, cols)) ?? COUNTS[3]);
    const swatches = layer.heads.map((head, n) => this.swatch(head, n));
    return [
      hiding.tools(this.app),
      choice("draw", { head: "one layer", model: "all layers" }, state.lines, (lines) => this.app.go({ lines })),
      el(
        "div",
        { class: "stepper" },
        button("earlier tokens", () => this.move(-1), "‹"),
        el("span", {}, `tokens ${range}`),
        button("later tokens", () => this.move(1), "›"),
      ),
      menu("tokens", named(COUNTS.map(String)), count, (n) => this.app.go({ window: [row, col, Number(n)] })),
      state.lines === "head"
        ? el("div", { class: "swatches", role: "group", "aria-label": "heads drawn" }, ...swatches)
        : el("span"),
    ];
  }

  table(): string[][] {
    const { row, col } = this.window();
    const rows = [["head", "query", "query token", "key", "key token", "weight", ...COLUMNS]];
    this.each((head, i, j, weight) => {
      const [left, top] = [this.tokens.left?.[row + i]?.raw ?? "", this.tokens.top?.[col + j]?.raw ?? ""];
      if (weight > 0)
        rows.push([
          String(this.app.layer.heads[head]),
          String(row + i),
          left,
          String(col + j),
          top,
          String(weight),
          ...fields(this.block!),
        ]);
    });
    return rows;
  }

  /** Rows and columns on screen: as chosen, else the part of the map that was on screen, else the start. */
  private window(): { row: number; rows: number; col: number; cols: number } {
    const { window, at, lines } = this.app.state;
    const { n_i, n_j } = this.app.layer;
    const most = lines === "model" ? 32 : COUNTS[3];
    const seen = at && at[2] <= COUNTS[3] ? Math.ceil(at[2]) : 32;
    const [row, col, count] = window ?? (at && at[2] < n_j ? [at[0] - seen / 2, at[1] - seen / 2, seen] : [0, 0, 32]);
    const within = (first: number, n: number): [number, number] => {
      const size = Math.min(count, most, n);
      return [Math.max(0, Math.min(Math.round(first), n - size)), size];
    };
    const [[y, rows], [x, cols]] = [within(row, n_i), within(col, n_j)];
    return { row: y, rows, col: x, cols };
  }

  private move(by: number): void {
    const { row, rows, col, cols } = this.window();
    const count = Math.max(rows, cols);
    const step = Math.max(1, Math.floor(count / 2)) * by;
    this.app.go({ window: [Math.max(0, row + step), Math.max(0, col + step), count] });
  }

  private async show(state: State): Promise<void> {
    this.app.mustHaveWeights();
    const { place } = this.app;
    const window = this.window();
    const key = JSON.stringify([place, window, state.lines, state.lines === "model" && state.between]);
    if (key !== this.asked) {
      this.asked = key;
      this.block = null;
      this.stop.abort();
      this.stop = new AbortController();
      const { signal } = this.stop;
      const [left, top] = await Promise.all([this.app.tokens(place, "query"), this.app.tokens(place, "key")]);
      const hidden = await hiding.words(this.app, place);
      const sentences = (axis: Axis): Promise<Grouping | null> => this.app.groups(place, axis, "sentences").catch(() => null);
      const [ofQueries, ofKeys] = await Promise.all([sentences("query"), sentences("key")]);
      if (signal.aborted) return;
      this.hidden = hidden;
      this.tokens = { left, top };
      this.sentences = { left: ofQueries, top: ofKeys };
      if (state.lines === "model") return this.model(signal);
      const block = await this.app.source.block(place, window.row, window.rows, window.col, window.cols, signal);
      if (signal.aborted) return;
      this.block = block;
    }
    if (state.lines === "head") this.draw();
    else
      for (const canvas of this.body.querySelectorAll<HTMLCanvasElement>("canvas"))
        canvas.dispatchEvent(new Event("paint"));
  }

  private draw(): void {
    const { layer, theme } = this.app;
    const { row, rows, col, cols } = this.window();
    const links: Link[] = [];
    let most = 0;
    this.each((_head, _row, _col, weight) => (most = Math.max(most, weight || 0)));
    const shown = this.app.state.shown ?? [...layer.heads.keys()];
    this.each((head, left, right, weight) => {
      const colour = headColour(head, layer.heads.length, theme);
      const about = `${number(weight, digits(this.block!.error))} ${shown.length > 1 ? `head ${layer.heads[head]}` : ""}`.trim();
      if (weight > FAINTEST * most)
        links.push({ left, right, weight: weight / most, colour, head: shown.indexOf(head), about });
    });
    const text = (tokens: Token[] | null, first: number, count: number): string[] =>
      Array.from({ length: count }, (_, n) => tokens?.[first + n]?.text ?? String(first + n));
    const away = this.block && cols < layer.n_j ? goingOutside(this.block, shown) : null;
    const words = text(this.tokens.left, row, rows);
    const queries = { title: "queries", axis: "query" as const, first: row, words, ...(away && { outside: away }) };
    const keys = { title: "keys", axis: "key" as const, first: col, words: text(this.tokens.top, col, cols) };
    const known = this.block && said(this.block);
    const strongest = most
      ? `the strongest line is a weight of ${number(most, digits(this.block!.error))}${known ? ` ${known}` : ""}`
      : "no weight here is above 0";
    const share = this.block && cols < layer.n_j && outside([this.block], this.app.state.shown);
    const below = [strongest, share, this.hidden].filter(Boolean).join("; ");
    const drawing = columns(this.app, this.body, { left: queries, right: keys }, links, 860, shown.length);
    this.legend.lines(most || 1, "weight of a line; its colour is the head");
    const bar = away && el("p", { class: "faint scale" }, "a bar beside a query: what it gives to keys outside of this window");
    const about = el("p", { class: "faint scale" }, below);
    fill(this.body, this.sentenceMenus(), drawing, this.legend.element, about, bar);
  }

  /** Menus of the sentences whose lines are drawn: from one, to another. */
  private sentenceMenus(): HTMLElement | null {
    const { left, top } = this.sentences;
    if (!left || !top || Math.max(left.labels.length, top.labels.length) < 2) return null;
    const { row, col } = this.window();
    const [from, to] = this.between();
    const pick = (name: "from" | "to", groups: Grouping, tokens: Token[] | null, at: number, now: string): HTMLElement => {
      const { ids, labels } = groups;
      const near = Math.max(0, Math.min(ids[at] - LISTED / 2, labels.length - LISTED));
      const numbers = [...labels.keys()].filter((n) => (n >= near && n < near + LISTED) || String(n) === now);
      const words = (n: number): string => {
        const [first, count] = extent(groups, n);
        return `${letter(n)}: ${short(phrase(tokens, first, first + count - 1, 6), 40)}`;
      };
      // Numbers would come before names, whatever their order here.
      const options = Object.fromEntries([["any", "any"], ...numbers.map((n) => [`s${n}`, words(n)])]);
      return menu(`${name} sentence`, options, now === "any" ? now : `s${now}`, (chosen) => {
        const n = chosen.replace(/^s/, "");
        this.narrow(name === "from" ? n : from, name === "to" ? n : to);
      });
    };
    return el("div", { class: "between" }, pick("from", left, this.tokens.left, row, from), pick("to", top, this.tokens.top, col, to));
  }

  /** The numbers of the sentences whose lines are drawn, `any` for all. */
  private between(): [from: string, to: string] {
    const { left, top } = this.sentences;
    const [from, to] = this.app.state.between.split("-");
    const known = (n: string | undefined, groups: Grouping | null): string => (n && groups && Number(n) < groups.labels.length ? n : "any");
    return [known(from, left), known(to, top)];
  }

  /** Whether a row and a column of the window are in the sentences whose lines are drawn. */
  private isDrawn(): (row: number, col: number) => boolean {
    const { row, col } = this.window();
    const [from, to] = this.between();
    const within = (groups: Grouping | null, n: number, wanted: string): boolean => wanted === "any" || groups?.ids[n] === Number(wanted);
    return (i, j) => within(this.sentences.left, row + i, from) && within(this.sentences.top, col + j, to);
  }

  /** Draw the lines between two sentences, and move to where they begin. */
  private narrow(from: string, to: string): void {
    const { left, top } = this.sentences;
    const { row, rows, col, cols } = this.window();
    const [y, high] = from === "any" ? [row, rows] : extent(left!, Number(from));
    const [x, wide] = to === "any" ? [col, cols] : extent(top!, Number(to));
    const count = COUNTS.find((n) => n >= Math.max(high, wide)) ?? COUNTS[3];
    this.app.go({ between: from === "any" && to === "any" ? "" : `${from}-${to}`, window: [y, x, count] });
  }

  /** Every weight of the heads drawn. */
  private each(visit: (head: number, row: number, col: number, weight: number) => void): void {
    const { block } = this;
    if (!block) return;
    const isDrawn = this.isDrawn();
    for (const head of this.app.state.shown ?? [...Array(block.heads).keys()]) {
      for (let i = 0; i < block.rows; i++) {
        for (let j = 0; j < block.cols; j++)
          if (isDrawn(i, j)) visit(head, i, j, block.weight[(head * block.rows + i) * block.cols + j]);
      }
    }
  }

  /** A small picture of each head of each layer, those of the same size. */
  private async model(signal: AbortSignal): Promise<void> {
    const { layers } = this.app.capture;
    const { n_i, n_j } = this.app.layer;
    const names = layerNames(layers);
    const window = this.window();
    fill(this.body, this.sentenceMenus());
    const blocks: Block[] = [];
    for (const [at, layer] of layers.entries()) {
      if (layer.n_i !== n_i || layer.n_j !== n_j || layer.kind !== "weights" || this.app.state.batch >= layer.batch)
        continue;
      const block = await this.app.source.block(
        this.app.placeOf(at),
        window.row,
        window.rows,
        window.col,
        window.cols,
        signal,
      );
      if (signal.aborted) return;
      blocks.push(block);
      const cells = layer.heads.map((head, n) => this.small(block, at, n, head));
      this.body.append(
        el(
          "section",
          { class: "layer" },
          el("h2", { title: layer.name }, names[at]),
          el("div", { class: "heads" }, ...cells),
        ),
      );
    }
    const own = "lines of a layer are drawn to its largest weight here";
    const below = [own, window.cols < n_j && outside(blocks, null), hiding.plain(this.app.place.hide)];
    this.legend.lines("largest of the layer", "weight of a line; its colour is the head");
    this.body.append(this.legend.element, el("p", { class: "faint scale" }, below.filter(Boolean).join("; ")));
  }

  private small(block: Block, layer: number, n: number, head: number): HTMLElement {
    const canvas = el("canvas");
    const most = largest(block);
    const paint = (): void => {
      const [width, height] = [76, Math.max(40, Math.min(120, 3 * Math.max(block.rows, block.cols)))];
      const context = sized(canvas, width, height);
      context.strokeStyle = headColour(n, block.heads, this.app.theme);
      const y = (at: number, count: number): number => ((at + 0.5) * height) / count;
      const isDrawn = this.isDrawn();
      for (let i = 0; i < block.rows; i++) {
        for (let j = 0; j < block.cols; j++) {
          const weight = block.weight[(n * block.rows + i) * block.cols + j] / most;
          if (!(weight >= 0.05) || !isDrawn(i, j)) continue;
          context.globalAlpha = weight;
          context.beginPath();
          context.moveTo(4, y(i, block.rows));
          context.lineTo(width - 4, y(j, block.cols));
          context.stroke();
        }
      }
    };
    canvas.addEventListener("paint", paint);
    paint();
    const open = (): void => this.app.go({ lines: "head", layer, head: n, shown: [n] });
    const about = `${this.app.capture.layers[layer].name}, head ${head}`;
    return el(
      "button",
      { type: "button", class: "head", "aria-label": about, title: about, onclick: open },
      el("span", { class: "thumb" }, canvas),
    );
  }

  private swatch(head: number, n: number): HTMLElement {
    const { shown } = this.app.state;
    const all = [...this.app.layer.heads.keys()];
    const on = shown?.includes(n) ?? true;
    const toggle = (event: MouseEvent): void => {
      const alone = shown?.length === 1 && shown[0] === n;
      const chosen =
        event.shiftKey || (shown && shown.length < all.length)
          ? on
            ? (shown ?? all).filter((m) => m !== n)
            : [...(shown ?? []), n].sort((a, b) => a - b)
          : [n];
      this.app.go({ shown: alone || chosen.length === all.length ? null : chosen });
    };
    const mark = el("i");
    mark.style.backgroundColor = headColour(n, all.length, this.app.theme);
    return el(
      "button",
      {
        type: "button",
        class: "swatch",
        "aria-pressed": String(on),
        "aria-label": `head ${head}`,
        "data-control": `swatch ${n}`,
        onclick: toggle,
      },
      mark,
      head,
    );
  }
}

/** Which share of what the queries of some blocks give goes to keys outside, in words. */
function outside(blocks: Block[], shown: number[] | null): string {
  let [inside, all] = [0, 0];
  for (const { heads, rows, cols, weight, total } of blocks) {
    if (!total) return "what these queries give to keys outside of this window is not counted at this length";
    for (const head of shown ?? Array(heads).keys()) {
      const sum = (values: Float32Array, size: number): number =>
        values.subarray(head * size, (head + 1) * size).reduce((whole, value) => whole + (value || 0), 0);
      inside += sum(weight, rows * cols);
      all += sum(total, rows);
    }
  }
  const share = all > 0 ? 1 - inside / all : 0;
  const percent = share < 0.0005 ? "nothing" : share < 0.1 ? `${(100 * share).toFixed(1)} %` : `${Math.round(100 * share)} %`;
  return `${percent} of what these queries give goes to keys outside of this window`;
}

/** Of what each query of a block gives, the share that goes to keys outside; null where the totals are not known. */
function goingOutside({ rows, cols, weight, total }: Block, shown: number[]): number[] | null {
  if (!total) return null;
  return Array.from({ length: rows }, (_, row) => {
    let [inside, all] = [0, 0];
    for (const head of shown) {
      const first = (head * rows + row) * cols;
      inside += weight.subarray(first, first + cols).reduce((sum, value) => sum + (value || 0), 0);
      all += total[head * rows + row] || 0;
    }
    const share = all > 0 ? 1 - inside / all : 0;
    return share < 0.0005 ? 0 : share;
  });
}

/** Where a sentence begins, and how many tokens it has. */
function extent({ ids }: Grouping, sentence: number): [first: number, count: number] {
  return [ids.indexOf(sentence), ids.lastIndexOf(sentence) + 1 - ids.indexOf(sentence)];
}

/** The name of a sentence: A to Z, then numbers. */
function letter(n: number): string {
  return n < 26 ? String.fromCharCode(65 + n) : String(n);
}

/** The largest weight of a block, 0 where none is a number. */
function largest({ weight }: Block): number {
  return weight.reduce((top, value) => Math.max(top, value || 0), 0);
}

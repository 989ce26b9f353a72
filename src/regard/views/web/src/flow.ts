// Flow: what a token at the top has drawn from the input, layer by layer; entropy and distance of every head by layer.

import { axisBottom, axisLeft } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { type App, layerNames, type View, words } from "./app";
import { roundStep } from "./axes";
import { COLUMNS, fields, said, together } from "./certainty";
import { byLayer } from "./charts";
import { button, menu, notice } from "./controls";
import { el, fill, svg } from "./element";
import { short } from "./glyphs";
import { Legend, number } from "./legend";
import type { Token } from "./marks";
import { ranking } from "./ranking";
import { pause } from "./remote";
import { several } from "./several";
import type { Flow, Layer, Overview } from "./source";
import { phrase } from "./span";
import type { State } from "./state";

const MARGIN = { left: 128, bottom: 92, top: 8, right: 16 };
const HEIGHT = 420; // pixels of all layers, at 14 to 26 each
const LISTED = 16;
const MEASURED_AT_ONCE = 3; // layers whose sample is replaced at a time
const NONE = "Flow follows a token through layers of self-attention; this capture has none over one text.";
const METHOD =
  "Rollout: the mean of the heads, half of it passed by, multiplied down through the layers (Abnar & Zuidema 2020).";

export class FlowView implements View {
  readonly keys: Record<string, () => void> = {
    ArrowLeft: () => this.step(-1),
    ArrowRight: () => this.step(1),
  };
  private readonly head = el("header");
  private readonly strip = el("div", { class: "strip" });
  private readonly side = el("aside", { class: "links", "aria-label": "strongest input tokens", tabindex: 0 });
  private readonly charts = el("div", { class: "charts" });
  private readonly legend = new Legend();
  private readonly watch = new ResizeObserver(() => this.draw());
  private stop = new AbortController();
  private asked = "";
  private measured = "";
  private flow: Flow | null = null;
  private tokens: Token[] | null = null;

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    fill(host, el("div", { class: "flow" }, el("div", { tabindex: 0, role: "region", "aria-label": "flow" }, this.head, this.strip, this.charts), this.side));
    this.watch.observe(this.strip);
  }

  update(state: State): void {
    const fail = (error: unknown): void => {
      const text = words(error);
      if (text) fill(this.strip, notice(text));
    };
    void this.show(state).catch(fail);
    void this.measure(state).catch(fail);
  }

  close(): void {
    this.stop.abort();
    this.measured = "";
    this.watch.disconnect();
  }

  tools(): Node[] {
    const { layers } = this.app.capture;
    const names = layerNames(layers);
    const offered = [...layers.keys()].filter((n) => this.flows(layers[n]));
    const options = Object.fromEntries(offered.map((n) => [n, names[n]]));
    return [
      menu("from layer", options, String(this.top), (n) => this.app.go({ top: Number(n) })),
      button("previous token", () => this.step(-1), "‹ token"),
      button("next token", () => this.step(1), "token ›"),
    ];
  }

  table(): string[][] {
    const rows = [["output of", "token", "text", "share", ...COLUMNS]];
    const { flow } = this;
    if (!flow) return rows;
    const names = this.levels(flow);
    flow.rollout.forEach((share, n) => {
      const [level, cell] = [Math.floor(n / flow.cells), n % flow.cells];
      const first = cell * 2 ** flow.level;
      if (share > 0) rows.push([names[level], String(first), this.tokens?.[first]?.raw ?? "", String(share), ...fields(flow)]);
    });
    return rows;
  }

  /** Whether a token can be followed from the output of a layer. */
  private flows(layer: Layer | undefined): boolean {
    return layer !== undefined && layer.stack.length > 0 && this.app.state.batch < layer.batch;
  }

  /** The layer to start from: as chosen, else the last that the layer on screen flows into; or null. */
  private get top(): number | null {
    const { layers } = this.app.capture;
    const { top, layer } = this.app.state;
    if (top !== null && this.flows(layers[top])) return top;
    const some = this.flows(layers[layer]) ? layer : layers.findIndex((one) => this.flows(one));
    return some < 0 ? null : layers.findLastIndex(({ stack }) => stack.includes(some));
  }

  /** The token followed: the one chosen, else the last that is not padding. */
  private token(): number {
    const { chosen, axis, batch } = this.app.state;
    const { n_i, padding } = this.app.capture.layers[this.top!];
    let last = n_i - 1;
    for (const [first, stop] of chosen ? [] : (padding?.[batch]?.[1] ?? []).toReversed()) if (stop === last) last = first - 1;
    const { self, offset } = this.app.layer;
    const at = chosen ? chosen[0] + (axis === "query" && self ? offset : 0) : last;
    return Math.max(0, Math.min(at, last));
  }

  private async show(state: State): Promise<void> {
    const { top } = this;
    if (top === null) return fill(this.strip, notice(NONE));
    const token = this.token();
    const key = `${state.capture} ${top} ${state.batch} ${token}`;
    if (key === this.asked) return this.draw();
    this.asked = key;
    this.stop.abort();
    this.stop = new AbortController();
    const { signal } = this.stop;
    const place = { capture: state.capture, batch: state.batch, layer: top };
    this.tokens = await this.app.tokens(place, "key");
    for (;;) {
      const flow = await this.app.source.flow(place, token, signal);
      if (signal.aborted) return;
      this.flow = flow;
      this.draw();
      if (flow.retry === null) return;
      await pause(flow.retry, signal);
    }
  }

  /** What the rows of a rollout are, from the input up: outputs of layers. */
  private levels(flow: Flow): string[] {
    const names = layerNames(this.app.capture.layers);
    return ["input", ...flow.layers.map((layer) => names[layer])];
  }

  /** The tokens of a cell, in words. */
  private cell(flow: Flow, cell: number): string {
    const width = 2 ** flow.level;
    const last = Math.min((cell + 1) * width, this.tokens?.length ?? Infinity) - 1;
    return phrase(this.tokens, cell * width, last, 6);
  }

  private draw(): void {
    const { flow } = this;
    const width = this.strip.clientWidth;
    if (!flow || !width || this.top === null) return;
    const token = this.token();
    const name = el("bdi", { class: "token" }, phrase(this.tokens, token, token));
    const origin = said(flow) && `weights ${said(flow)}`;
    const badge = origin && el("span", { class: "badge" }, origin);
    fill(this.head, el("h2", {}, "Where ", name, el("span", { class: "faint" }, ` ${token} `), "comes from"), badge);
    const names = this.levels(flow);
    const rows = names.length;
    const [across, down] = [width - MARGIN.left - MARGIN.right, rows * Math.max(14, Math.min(26, HEIGHT / rows))];
    const about = { width, height: down + MARGIN.top + MARGIN.bottom, "aria-label": "rollout by layer", role: "img" };
    const note = el("output", { class: "faint" });
    fill(
      this.strip,
      svg("svg", about, ...this.axes(flow, names, across, down)),
      this.heat(flow, names, across, down, note),
      note,
      this.legend.element,
    );
    const shares = [...flow.rollout.subarray(0, flow.cells)].map((weight, n) => ({ n, weight }));
    const best = shares.filter(({ weight }) => weight > 0).sort((a, b) => b.weight - a.weight);
    const items = best
      .slice(0, LISTED)
      .map(({ n, weight }) => ({ n: n * 2 ** flow.level, text: this.cell(flow, n), weight }));
    const list = ranking(items, (n) => this.choose(n), flow.error);
    fill(this.side, el("section", {}, el("h3", {}, "input tokens"), list), el("p", { class: "hint" }, METHOD));
  }

  /** The rollout as a picture, the token on top and the input below. */
  private heat(flow: Flow, names: string[], across: number, down: number, note: HTMLElement): HTMLCanvasElement {
    const { cells, rollout } = flow;
    const rows = names.length;
    const row = (n: number): Float32Array => rollout.subarray(n * cells, (n + 1) * cells);
    const dots = Math.min(cells, Math.max(1, Math.floor(across * devicePixelRatio)));
    const turned = new Float32Array(rows * dots);
    for (let n = 0; n < rows; n++) turned.set(largest(row(rows - 1 - n), dots), n * dots);
    const most = row(0).reduce((top, value) => Math.max(top, value || 0), 1e-9);
    const canvas = el("canvas", { width: dots, height: rows });
    const ramp = this.app.ramp(most);
    canvas.getContext("2d")!.putImageData(ramp.pixels(turned, rows, dots), 0, 0);
    const largestShare = rollout.reduce((top, value) => Math.max(top, value || 0), 0);
    this.legend.draw(ramp, "share of the token that comes from here", largestShare > most * 1.001);
    const pixels = { left: MARGIN.left, top: MARGIN.top, width: across, height: down };
    for (const [name, value] of Object.entries(pixels)) canvas.style.setProperty(name, `${value}px`);
    const under = (event: MouseEvent): [number, number] => {
      const box = canvas.getBoundingClientRect();
      const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
      return [Math.min(cells - 1, Math.floor(x * cells)), Math.max(0, rows - 1 - Math.floor(y * rows))];
    };
    canvas.addEventListener("pointermove", (event) => {
      const [cell, level] = under(event);
      note.textContent = `${names[level]}: ${this.cell(flow, cell)}, ${number(row(level)[cell])}`;
    });
    canvas.addEventListener("click", (event) => this.choose(under(event)[0] * 2 ** flow.level));
    return canvas;
  }

  private axes(flow: Flow, names: string[], across: number, down: number): SVGGElement[] {
    const { tokens } = this;
    const width = 2 ** flow.level;
    const count = tokens?.length ?? flow.cells * width;
    const step = roundStep(Math.max(width, (count / across) * 17));
    const token = (n: number): string => {
      if (!tokens?.[n]) return String(n);
      return step === 1 ? short(tokens[n].text, 14) : `${n} ${short(tokens[n].text, 9)}`;
    };
    const layer = (n: number): string => (n === names.length - 1 ? "token" : short(names[n], 17));
    const bottom = axisBottom(scaleLinear([0, flow.cells * width], [0, across]))
      .tickValues(Array.from({ length: Math.ceil(count / step) }, (_, n) => n * step + width / 2))
      .tickFormat((value) => token(Math.floor(Number(value) - width / 2)))
      .tickSizeInner(step === 1 ? 0 : 4)
      .tickSizeOuter(0);
    const left = axisLeft(scaleLinear([0, names.length], [down, 0]))
      .tickValues(names.map((_, n) => n + 0.5))
      .tickFormat((value) => layer(Math.floor(Number(value))))
      .tickSize(0)
      .tickPadding(10);
    const under = svg("g", { class: "axis", transform: `translate(${MARGIN.left}, ${MARGIN.top + down})` });
    const beside = svg("g", { class: "axis", transform: `translate(${MARGIN.left}, ${MARGIN.top})` });
    select(beside).call(left as never);
    select(under)
      .call(bottom as never)
      .selectAll("text")
      .attr("transform", "translate(-5, 6) rotate(-58)")
      .attr("text-anchor", "end")
      .attr("dy", "0.2em");
    return [under, beside];
  }

  private choose(n: number): void {
    const { self, offset } = this.app.layer;
    const queries = self && n >= offset;
    this.app.go({ chosen: queries ? [n - offset, n - offset] : [n, n], axis: queries ? "query" : "key" });
  }

  private step(by: number): void {
    if (this.top !== null) this.choose(Math.max(0, this.token() + by));
  }

  /** Entropy and distance of every head of every layer. */
  private async measure({ capture, batch }: State): Promise<void> {
    const key = `${capture} ${batch}`;
    if (key === this.measured) return;
    this.measured = key;
    const { layers } = this.app.capture;
    const chosen = [...layers.keys()].filter((layer) => batch < layers[layer].batch);
    const found: Overview[] = [];
    const work = async (layer: number): Promise<void> => {
      found[chosen.indexOf(layer)] = await this.app.source.overview({ capture, layer, batch });
    };
    const wanted = (): boolean => key === this.measured;
    await several(chosen, work, wanted);
    while (wanted()) {
      this.chart(
        chosen.map((layer) => layers[layer]),
        found,
      );
      const { retry } = together(found);
      if (retry === null) return;
      await pause(retry);
      const sampled = chosen.filter((_, n) => found[n].retry !== null).slice(0, MEASURED_AT_ONCE);
      await several(sampled, work, wanted);
    }
  }

  private chart(layers: Layer[], found: Overview[]): void {
    const kinds = layers.map(({ self }) => (self ? "self" : "cross"));
    const cross = kinds.includes("cross");
    const known = said({ ...together(found), error: 0 });
    const entropy = byLayer(
      found.map((overview) => overview.entropy),
      kinds,
      "entropy, nats",
      [cross && "a line for self- and one for cross-attention", known].filter(Boolean).join("; "),
    );
    const distance = byLayer(
      found.map((overview, n) => (layers[n].self ? overview.distance : new Float32Array())),
      kinds,
      "distance, tokens",
      [cross && "of self-attention alone", known].filter(Boolean).join("; "),
    );
    fill(this.charts, entropy, distance);
  }
}

/** The largest of each of so many runs of values, which a pixel each can show. */
function largest(values: Float32Array, runs: number): Float32Array {
  const found = new Float32Array(runs);
  values.forEach((value, n) => {
    const run = Math.floor((n * runs) / values.length);
    found[run] = Math.max(found[run], value);
  });
  return found;
}

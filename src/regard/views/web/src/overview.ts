// Overview: every head of every layer as a small map, with its entropy and a mark where it has a sink.

import { type App, headName, isEmpty, layerNames, type View, words } from "./app";
import { Spread } from "./colours";
import { menu, notice } from "./controls";
import { el, fill } from "./element";
import { several } from "./several";
import type { Layer, Overview } from "./source";
import type { Sort, State } from "./state";

/** A head with its measures. */
interface Item {
  layer: number;
  head: number;
  entropy: number;
  distance: number;
  max: number;
  sink: number;
  /** Mean absolute difference of the two captures' thumbnails. */
  difference: number;
  thumb: Float32Array;
  size: [number, number];
  signed: boolean;
}

const MEASURES = { layer: "by layer", entropy: "entropy", distance: "distance", max: "largest weight", sink: "sink" };

export class OverviewView implements View {
  readonly keys: Record<string, () => void> = {
    ArrowLeft: () => this.step(-1, 0),
    ArrowRight: () => this.step(1, 0),
    ArrowUp: () => this.step(0, -1),
    ArrowDown: () => this.step(0, 1),
  };
  private readonly body = el("div", { class: "overview", role: "region", "aria-label": "heads" });
  private readonly filter: HTMLInputElement;
  private readonly names: string[];
  private readonly watch = new ResizeObserver(() => this.fit());
  private items: Item[] = [];
  private asked = "";
  private pending = 0;

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    this.names = layerNames(app.capture.layers);
    this.filter = el("input", {
      type: "search",
      placeholder: "name, sink>0.3, entropy<1",
      "aria-label": "filter",
      "data-control": "filter",
      spellcheck: "false",
      oninput: () => app.go({ filter: this.filter.value }, "slide"),
    });
    fill(host, this.body);
    this.watch.observe(this.body);
  }

  update(state: State): void {
    if (this.filter.value !== state.filter) this.filter.value = state.filter;
    const key = `${state.capture} ${state.batch} ${state.against === "capture"}`;
    if (key !== this.asked) void this.load(key);
    else this.draw();
  }

  close(): void {
    this.asked = "";
    cancelAnimationFrame(this.pending);
    this.watch.disconnect();
  }

  tools(): Node[] {
    const { state } = this.app;
    const offered = state.against === "capture" ? { ...MEASURES, difference: "difference A − B" } : MEASURES;
    return [menu<Sort>("sort", offered, state.sort, (sort) => this.app.go({ sort })), this.filter];
  }

  table(): string[][] {
    const rows = [["layer", "head", "entropy", "distance", "largest weight", "sink"]];
    for (const item of this.chosen()) {
      const { name, heads } = this.app.capture.layers[item.layer];
      rows.push([name, String(heads[item.head]), ...[item.entropy, item.distance, item.max, item.sink].map(String)]);
    }
    return rows;
  }

  private async load(key: string): Promise<void> {
    this.asked = key;
    this.items = [];
    const { layers } = this.app.capture;
    const { batch, capture } = this.app.state;
    const wanted = [...layers.keys()].filter((layer) => batch < layers[layer].batch && !isEmpty(layers[layer]));
    fill(this.body, notice(wanted.length ? "reading the heads …" : "No layer has anything to show."));
    const work = async (layer: number): Promise<void> => {
      const [one, other] = await Promise.all([this.app.source.overview({ capture, layer, batch }), this.other(layer)]);
      if (key !== this.asked) return;
      this.items.push(...items(layer, one, other));
      this.items.sort((a, b) => a.layer - b.layer || a.head - b.head);
      this.pending ||= requestAnimationFrame(() => this.draw());
    };
    try {
      await several(wanted, work, () => key === this.asked);
    } catch (error) {
      if (key === this.asked) this.body.prepend(notice(words(error) ?? ""));
    }
  }

  private async other(layer: number): Promise<Overview | null> {
    const { state } = this.app;
    const found = state.against === "capture" ? this.app.counterpart(layer) : null;
    return found === null
      ? null
      : this.app.source.overview({ capture: 1 - state.capture, layer: found, batch: state.batch });
  }

  private chosen(): Item[] {
    const { sort, filter } = this.app.state;
    const found = this.items.filter((item) =>
      passes(item, filter, this.app.capture.layers[item.layer], this.names[item.layer]),
    );
    return sort === "layer" ? found : found.sort((a, b) => (b[sort] || 0) - (a[sort] || 0));
  }

  private draw(): void {
    this.pending = 0;
    const chosen = this.chosen();
    const { layers } = this.app.capture;
    if (this.app.state.sort !== "layer") {
      const cells = chosen.map((item) =>
        this.cell(item, `${this.names[item.layer]} · ${layers[item.layer].heads[item.head]}`),
      );
      fill(this.body, el("div", { class: "heads flat" }, ...cells));
    } else {
      const rows = [...new Set(chosen.map(({ layer }) => layer))].map((layer) => {
        const cells = chosen.filter((item) => item.layer === layer).map((item) => this.cell(item, null));
        return el(
          "section",
          { class: "layer" },
          el("h3", { title: layers[layer].name }, this.names[layer]),
          el("div", { class: "heads" }, ...cells),
        );
      });
      const widest = Math.max(0, ...chosen.map(({ head }) => head + 1));
      const numbers = layers[chosen[0]?.layer ?? 0].heads.slice(0, widest);
      const ruler = el(
        "section",
        { class: "layer ruler", "aria-hidden": "true" },
        el("h3"),
        el("div", { class: "heads" }, ...numbers.map((head) => el("span", {}, head))),
      );
      fill(this.body, ruler, ...rows);
    }
    if (!chosen.length && this.items.length) this.body.append(notice("No head passes the filter."));
    const key = el(
      "p",
      { class: "hint key" },
      el("span", { class: "entropy" }, el("i")),
      "entropy, full where attention is uniform",
      el("span", { class: "sink" }),
      "attention sink, stronger the more it draws",
    );
    this.body.append(key);
    this.fit();
  }

  private cell(item: Item, caption: string | null): HTMLElement {
    const { layers } = this.app.capture;
    const layer = layers[item.layer];
    const canvas = el("canvas", { width: item.size[1], height: item.size[0] });
    const spread = new Spread();
    spread.add(item.thumb);
    const ramp = this.app.ramp(spread.quantile(0.995) ?? 1, item.signed);
    canvas.getContext("2d")!.putImageData(ramp.pixels(item.thumb, ...item.size), 0, 0);
    const share = (item.entropy || 0) / Math.log(Math.max(2, layer.n_j));
    const bar = el("span", { class: "entropy" }, el("i"));
    (bar.firstChild as HTMLElement).style.width = `${Math.min(100, 100 * share)}%`;
    const sink = item.sink > 0 ? el("span", { class: "sink" }) : null;
    if (sink) sink.style.opacity = String(0.35 + 0.65 * item.sink);
    const about = `${layer.name}, ${headName(layer, item.head)}: ${facts(item)}`;
    const open = (): void => this.app.go({ view: "map", layer: item.layer, head: item.head, at: null });
    const current = item.layer === this.app.state.layer && item.head === this.app.state.head;
    return el(
      "button",
      {
        type: "button",
        class: `head${current ? " current" : ""}`,
        "aria-label": about,
        title: about,
        "data-layer": item.layer,
        "data-head": item.head,
        onclick: open,
      },
      el("span", { class: "thumb" }, canvas, sink),
      bar,
      caption === null ? null : el("span", { class: "name" }, caption),
    );
  }

  /** Thumbnails as large as the page has room for. */
  private fit(): void {
    const heads = Math.max(1, ...this.app.capture.layers.map((layer) => layer.heads.length));
    const rows = new Set(this.items.map(({ layer }) => layer)).size || 1;
    const [wide, high] = [(this.body.clientWidth - 160) / heads - 10, (window.innerHeight - 200) / rows - 20];
    this.body.style.setProperty("--cell", `${Math.floor(Math.max(44, Math.min(wide, Math.max(high, 76), 132)))}px`);
  }

  /** Move the focus through the grid by where things are on screen. */
  private step(right: number, down: number): void {
    const buttons = [...this.body.querySelectorAll<HTMLElement>("button.head")];
    const active = buttons.find((one) => one === document.activeElement);
    if (!active) return (this.body.querySelector<HTMLElement>("button.head.current") ?? buttons[0])?.focus();
    if (right) return buttons[buttons.indexOf(active) + right]?.focus();
    const here = active.getBoundingClientRect();
    const beyond = buttons.filter((one) => (one.getBoundingClientRect().top - here.top) * down > 4);
    const away = (one: HTMLElement): number => {
      const box = one.getBoundingClientRect();
      return Math.abs(box.top - here.top) * 4 + Math.abs(box.left - here.left);
    };
    beyond.sort((a, b) => away(a) - away(b))[0]?.focus();
  }
}

/** What is known of a head, in words. */
function facts({ entropy, distance, max, sink }: Item): string {
  const known: [string, number, number][] = [
    ["entropy", entropy, 2],
    ["distance", distance, 1],
    ["largest weight", max, 2],
  ];
  const said = known
    .filter(([, value]) => Number.isFinite(value))
    .map(([name, value, digits]) => `${name} ${value.toFixed(digits)}`);
  return [...said, ...(sink > 0 ? [`sink ${Math.round(100 * sink)} %`] : [])].join(", ");
}

function items(layer: number, one: Overview, other: Overview | null): Item[] {
  const count = one.size[0] * one.size[1];
  return [...one.entropy.keys()].map((head) => {
    const mine = one.thumbs.subarray(head * count, (head + 1) * count);
    const fits = other && String(other.size) === String(one.size) && head < other.entropy.length;
    const theirs = fits ? other.thumbs.subarray(head * count, (head + 1) * count) : null;
    const thumb = theirs ? mine.map((value, n) => value - theirs[n]) : mine;
    const difference = theirs ? thumb.reduce((sum, value) => sum + Math.abs(value), 0) / count : 0;
    const [entropy, distance, max, sink] = [one.entropy[head], one.distance[head], one.max[head], one.sink[head]];
    return { layer, head, entropy, distance, max, sink, difference, thumb, size: one.size, signed: theirs !== null };
  });
}

/** Whether a head passes every word of a filter: `entropy<1`, `sink>0.3`, or a part of its layer's name. */
function passes(item: Item, filter: string, layer: Layer, name: string): boolean {
  return filter
    .toLowerCase()
    .split(/[\s,]+/)
    .filter(Boolean)
    .every((word) => {
      const parts = /^(entropy|distance|max|sink|difference|head)([<>])(\d*\.?\d+)$/.exec(word);
      if (!parts) return layer.name.toLowerCase().includes(word) || name.toLowerCase().includes(word);
      const value = parts[1] === "head" ? layer.heads[item.head] : item[parts[1] as Exclude<Sort, "layer">];
      return parts[2] === "<" ? value < Number(parts[3]) : value > Number(parts[3]);
    });
}

// Shell: the frame around the views, with tabs, toolbar, search, export and keys.

import { AlignmentView } from "./alignment";
import { type App, isEmpty, layerNames, type View } from "./app";
import { PALETTES, SCALES } from "./colours";
import { CompareView } from "./compare";
import { button, choice, menu, named, notice, numbered, rebuild } from "./controls";
import { el, fill } from "./element";
import { type Kind, save } from "./export";
import { FlowView } from "./flow";
import { ImagesView } from "./images";
import { help } from "./help";
import { asKeys, spelled, toggledAll, toggledPart } from "./hiding";
import { listen } from "./keyboard";
import { LinesView } from "./lines";
import { MapView, title } from "./map";
import { OverviewView } from "./overview";
import { short } from "./glyphs";
import { readable } from "./marks";
import { matches } from "./search";
import type { Head } from "./source";
import { phrase } from "./span";
import { type Against, type State, type ViewName, VIEWS } from "./state";
import { TextView } from "./text";

const MAKE: Record<ViewName, new (app: App, host: HTMLElement) => View> = {
  overview: OverviewView,
  map: MapView,
  text: TextView,
  lines: LinesView,
  flow: FlowView,
  images: ImagesView,
  alignment: AlignmentView,
  compare: CompareView,
};
/** Which of the common controls a view has. */
const CONTROLS: Record<ViewName, ("layer" | "head" | "scale" | "against")[]> = {
  overview: ["scale", "against"],
  map: ["layer", "head", "scale", "against"],
  text: ["layer", "head", "scale"],
  lines: ["layer"],
  flow: ["scale"],
  images: ["layer", "head", "scale"],
  alignment: ["layer", "head", "scale"],
  compare: [],
};
/** A layer without texts, heads, queries or keys. */
class NothingView implements View {
  constructor(_app: App, host: HTMLElement) {
    fill(host, notice("This layer has nothing to show."));
  }

  update(): void {}

  close(): void {}

  table(): string[][] {
    return [];
  }
}

const CHIPS = 16; // heads that fit as buttons
const FIRST = 32; // characters of a text that name it
const WIDEST_SEARCH = 48; // tokens across that a search leaves on screen at most

export class Shell {
  private readonly tabs = el("nav", { class: "tabs", "aria-label": "views" });
  private readonly bar = el("div", { class: "bar", role: "toolbar", "aria-label": "view settings" });
  private readonly stage = el("main", { class: "stage", id: "stage" });
  private readonly search: HTMLInputElement;
  private readonly count = el("output", { class: "count" });
  private readonly exports: HTMLDialogElement;
  private readonly help = help();
  private view: View | null = null;
  private showing: (typeof MAKE)[ViewName] | null = null;

  constructor(private readonly app: App) {
    this.search = el("input", {
      type: "search",
      class: "search",
      placeholder: "search  /",
      "aria-label": "search tokens",
      spellcheck: "false",
      oninput: () => app.go({ find: this.search.value }, "slide"),
      onkeydown: (event: KeyboardEvent) => {
        if (event.key === "Enter") this.find(event.shiftKey ? -1 : 1);
        if (event.key === "Escape") this.search.blur();
      },
    });
    this.exports = this.exportDialog();
    const [capture] = app.session.captures;
    const { holds } = app.session;
    const facts = Object.entries(capture.facts)
      .map(([name, fact]) => `${name}: ${fact}`)
      .join("\n");
    document.body.replaceChildren(
      el(
        "header",
        { class: "head-bar" },
        el("h1", {}, "regard"),
        el("span", { class: "capture-name", title: facts }, app.session.captures.map(({ name }) => name).join(" · ")),
        this.tabs,
        el(
          "div",
          { class: "right" },
          el("label", { class: "find" }, this.search, this.count),
          button("export", () => this.exports.showModal(), "export"),
          button("dark or light", () => this.flip(), "◐"),
          button("help and keys", () => this.help.showModal(), "?"),
        ),
      ),
      el("section", { "aria-label": "settings" }, holds && el("p", { class: "holds" }, `This page holds ${holds}.`), this.bar),
      this.stage,
      this.help,
      this.exports,
    );
    app.source.waiting = (count, done) => this.wait(count, done);
    app.listen((state, before) => this.update(state, before));
    listen((key) => this.press(key));
    this.update(app.state, null);
  }

  /** A line along the toolbar while answers are waited for, and how far the server is. */
  private wait(count: number, done: number | null): void {
    this.bar.classList.toggle("waiting", count > 0);
    if (count === 0 || done !== null) this.bar.style.setProperty("--done", count === 0 ? "0" : String(done));
  }

  private update(state: State, before: State | null): void {
    document.documentElement.dataset["theme"] = this.app.theme;
    document.title = state.view === "overview" || state.view === "compare" ? `${this.app.capture.name} · regard` : `${title(this.app)} · regard`;
    if (this.search.value !== state.find) this.search.value = state.find;
    this.drawTabs();
    const wanted = this.hasNothing() ? NothingView : MAKE[state.view];
    const fresh = this.showing !== wanted || before?.capture !== state.capture;
    this.stage.dataset["view"] = state.view;
    if (fresh) {
      this.view?.close();
      fill(this.stage);
      this.showing = wanted;
      this.view = new wanted(this.app, this.stage);
    }
    this.view!.update(state, fresh ? null : before);
    this.drawBar();
    this.counted().catch(() => fill(this.count)); // the view says why
  }

  /** Whether the view is of one layer, and that is empty. */
  private hasNothing(): boolean {
    return CONTROLS[this.app.state.view].includes("layer") && isEmpty(this.app.layer);
  }

  private drawTabs(): void {
    const missing: Partial<Record<ViewName, string>> = {};
    const { layers } = this.app.capture;
    if (!this.app.capture.pictures.length) missing.images = "the capture holds no picture";
    if (layers.every((layer) => layer.self)) missing.alignment = "the capture holds no cross-attention";
    if (this.app.session.captures.length < 2) missing.compare = "one capture is open; open two to compare them";
    const tabs = VIEWS.map((name, n) =>
      el(
        "button",
        {
          type: "button",
          "data-control": name,
          "aria-current": name === this.app.state.view ? "page" : null,
          disabled: missing[name] !== undefined && name !== this.app.state.view,
          title: missing[name] ?? `${name}  ${n + 1}`,
          onclick: () => this.app.go({ view: name }),
        },
        name,
      ),
    );
    rebuild(this.tabs, ...tabs);
    this.tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  private drawBar(): void {
    const { app } = this;
    const { state, capture, session, layer } = app;
    const wanted = CONTROLS[state.view];
    const captures = session.captures.map(({ name }, n) => `${"AB"[n]} ${name}`);
    const texts = Array.from({ length: layer.batch }, (_, n) => this.textName(n));
    rebuild(
      this.bar,
      captures.length > 1 &&
        state.view !== "compare" &&
        choice("capture", numbered(captures), String(state.capture), (n) => app.go({ capture: Number(n) })),
      capture.batch > 1 &&
        menu("text", numbered(texts), String(state.batch), (n) => app.go({ batch: Number(n), chosen: null })),
      wanted.includes("layer") &&
        menu("layer", numbered(layerNames(capture.layers)), String(state.layer), (n) => app.go({ layer: Number(n) })),
      wanted.includes("head") && this.heads(),
      wanted.includes("against") && this.against(),
      ...(this.view?.tools?.() ?? []),
      wanted.includes("scale") && choice("scale", named(SCALES), state.scale, (scale) => app.go({ scale })),
      wanted.includes("scale") && menu("colours", named(PALETTES), state.palette, (palette) => app.go({ palette })),
    );
  }

  /** A text of the batch by its number and its first words. */
  private textName(batch: number): string {
    const number = this.app.layer.texts[batch]?.[0] ?? null;
    if (number === null) return String(batch);
    const { n, start } = this.app.capture.texts[number];
    const words = phrase(readable(start), 0, start.length - 1);
    return `${batch}: ${short(n > start.length ? `${words} …` : words, FIRST)}`;
  }

  private heads(): HTMLElement {
    const { layer, state } = this.app;
    const options: Record<string, string> = { ...numbered(layer.heads.map(String)), mean: "mean", max: "max" };
    const go = (name: string): void => this.app.go({ head: name === "mean" || name === "max" ? name : Number(name) });
    if (layer.heads.length > CHIPS) return menu("head", options, String(state.head), go);
    return choice("head", options, String(state.head), go);
  }

  private against(): HTMLElement | false {
    const { layer, session, state } = this.app;
    const options: Partial<Record<Against, string>> = { none: "nothing" };
    if (session.captures.length > 1) options.capture = `capture ${"AB"[1 - state.capture]}`;
    if (state.view === "map") {
      options["head.mean"] = "mean over heads";
      layer.heads.forEach((head, n) => (options[`head.${n}`] = `head ${head}`));
    }
    const offered = Object.keys(options).length > 1;
    return offered && menu("compare", options, state.against, (against) => this.app.go({ against }));
  }

  private exportDialog(): HTMLDialogElement {
    const kinds: [Kind, string][] = [
      ["png", "picture, two pixels for each of the screen's"],
      ["svg", "drawing, for papers"],
      ["csv", "numbers of what is on screen"],
    ];
    const run = (kind: Kind): void => {
      this.exports.close();
      const { state } = this.app;
      const name = state.view === "overview" || state.view === "compare" ? `${this.app.capture.name} ${state.view}` : `${title(this.app)} ${state.view}`;
      void save(kind, name, this.stage, () => this.view!.table());
    };
    const dialog = el(
      "dialog",
      { class: "exports", "aria-label": "export" },
      el(
        "div",
        {},
        el("h2", {}, "Export this view"),
        ...kinds.map(([kind, text]) =>
          el(
            "button",
            { type: "button", class: "kind", "data-kind": kind, onclick: () => run(kind) },
            el("b", {}, kind.toUpperCase()),
            el("span", {}, text),
          ),
        ),
      ),
    );
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    return dialog;
  }

  /** Matches of the search on the axis chosen. */
  private async found(): Promise<[number, number][]> {
    const { find, axis } = this.app.state;
    const tokens = find ? await this.app.tokens(this.app.place, axis) : null;
    return tokens ? matches(tokens, find) : [];
  }

  private async counted(): Promise<void> {
    const { find, chosen } = this.app.state;
    const found = await this.found();
    const at = found.findIndex(([first]) => first === chosen?.[0]);
    this.count.textContent = find ? `${at < 0 ? "" : `${at + 1} of `}${found.length}` : "";
  }

  /** Go to the next match, or the one before. */
  private find(by: 1 | -1): void {
    this.next(by).catch(() => fill(this.count)); // the view says why
  }

  private async next(by: 1 | -1): Promise<void> {
    const found = await this.found();
    if (!found.length) return;
    const { chosen, at, view } = this.app.state;
    const here = chosen?.[0] ?? -1;
    const next =
      by > 0
        ? (found.find(([first]) => first > here) ?? found[0])
        : (found.findLast(([first]) => first < here) ?? found[found.length - 1]);
    const { layer } = this.app;
    const centre = next[0] + 0.5;
    const around: State["at"] = [
      this.app.state.axis === "query" || layer.self ? centre : (at?.[0] ?? layer.n_i / 2),
      this.app.state.axis === "key" || layer.self
        ? centre + (layer.self ? layer.offset : 0)
        : (at?.[1] ?? layer.n_j / 2),
      Math.min(at?.[2] ?? WIDEST_SEARCH, WIDEST_SEARCH),
    ];
    const isSmall = at === null && Math.max(layer.n_i, layer.n_j) <= WIDEST_SEARCH; // the whole map stays on screen
    this.app.go({ chosen: next, ...(view === "map" && !isSmall ? { at: around } : {}) });
  }

  private flip(): void {
    this.app.go({ theme: this.app.theme === "dark" ? "light" : "dark" });
  }

  /** What a key does; false where it does nothing. */
  private press(key: string): boolean {
    const act = this.view?.keys?.[key] ?? this.common(key);
    act?.();
    return act !== undefined;
  }

  private common(key: string): (() => void) | undefined {
    const { app } = this;
    const { state, layer, capture } = app;
    if (/^[1-8]$/.test(key)) {
      const tab = this.tabs.querySelectorAll<HTMLButtonElement>("button")[Number(key) - 1];
      return () => tab.click();
    }
    const number = typeof state.head === "number" ? state.head : -1;
    const wrap = (n: number, count: number): number => (n + count) % count;
    const after = <T>(list: readonly T[], one: T): T => list[(list.indexOf(one) + 1) % list.length];
    const actions: Record<string, () => void> = {
      "]": () => app.go({ head: wrap(number + 1, layer.heads.length) }),
      "[": () => app.go({ head: wrap(Math.max(number, 0) - 1, layer.heads.length) }),
      "}": () => app.go({ layer: wrap(state.layer + 1, capture.layers.length) }),
      "{": () => app.go({ layer: wrap(state.layer - 1, capture.layers.length) }),
      m: () => app.go({ head: toggled(state.head, "mean") }),
      x: () => app.go({ head: toggled(state.head, "max") }),
      s: () => app.go({ scale: after(SCALES, state.scale) }),
      c: () => app.go({ palette: after(PALETTES, state.palette) }),
      v: () =>
        app.go({
          against: state.against !== "none" ? "none" : app.session.captures.length > 1 ? "capture" : "head.mean",
        }),
      t: () => this.flip(),
      e: () => this.exports.showModal(),
      "?": () => this.help.showModal(),
      "/": () => this.search.focus(),
      h: () => app.go({ hide: toggledAll(state.hide) }),
      H: () => state.chosen && app.go({ hide: toggledPart(state.hide, spelled(asKeys(app, state.chosen))) }),
      n: () => this.find(1),
      N: () => this.find(-1),
    };
    return Object.hasOwn(actions, key) ? actions[key] : undefined;
  }
}

function toggled(head: Head, to: "mean" | "max"): Head {
  return head === to ? 0 : to;
}

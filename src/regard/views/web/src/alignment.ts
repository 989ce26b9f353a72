// Alignment: source and target words joined by what the target looked at, beside the matrix of their weights.

import { type App, type View, words } from "./app";
import { COLUMNS, fields } from "./certainty";
import { columns, type Link } from "./columns";
import { choice, notice } from "./controls";
import { el, fill, svg } from "./element";
import { short } from "./glyphs";
import { Legend, mark, number } from "./legend";
import type { Alignment } from "./source";
import type { State } from "./state";

const CELL = 22;

export class AlignmentView implements View {
  private readonly body = el("div", { class: "alignment" });
  private readonly legend = new Legend();
  private stop = new AbortController();
  private asked = "";
  private found: Alignment | null = null;

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
    const options = { weights: "all weights", strongest: "strongest", mutual: "mutual" };
    return [choice("links", options, this.app.state.links, (links) => this.app.go({ links }))];
  }

  table(): string[][] {
    const rows = [["target", "target word", "source", "source word", "weight", "strongest", "mutual", ...COLUMNS]];
    const { found } = this;
    if (!found) return rows;
    const [strongest, mutual] = [found.links, found.mutual].map((links) => new Set(links.map(String)));
    found.weight.forEach((weight, n) => {
      const [t, s] = [Math.floor(n / found.source.length), n % found.source.length];
      rows.push([
        String(t),
        found.target[t],
        String(s),
        found.source[s],
        String(weight),
        String(strongest.has(`${s},${t}`)),
        String(mutual.has(`${s},${t}`)),
        ...fields(found),
      ]);
    });
    return rows;
  }

  private async show(state: State): Promise<void> {
    if (this.app.layer.self) {
      const cross = this.app.capture.layers.findIndex((layer) => !layer.self);
      if (cross >= 0) return this.app.go({ layer: cross }, "slide");
      return fill(
        this.body,
        notice("Alignment is for cross-attention, of a target over a source; this capture has none."),
      );
    }
    this.app.mustHaveWeights();
    const ask = JSON.stringify([this.app.place, state.head]);
    if (ask !== this.asked) {
      this.asked = ask;
      this.stop.abort();
      this.stop = new AbortController();
      const { signal } = this.stop;
      const found = await this.app.source.alignment(this.app.place, state.head, signal);
      if (signal.aborted) return;
      this.found = found;
    }
    this.draw();
  }

  private draw(): void {
    const { found } = this;
    if (!found) return;
    const { links } = this.app.state;
    const colour = getComputedStyle(this.body).getPropertyValue("--accent");
    const weight = (s: number, t: number): number => found.weight[t * found.source.length + s];
    const chosenLinks: Link[] =
      links === "weights"
        ? [...found.weight.entries()].flatMap(([n, w]) =>
            w > 0.03
              ? [{ left: n % found.source.length, right: Math.floor(n / found.source.length), weight: w, colour }]
              : [],
          )
        : (links === "mutual" ? found.mutual : found.links).map(([s, t]) => ({
            left: s,
            right: t,
            weight: 0.35 + 0.65 * weight(s, t),
            colour,
          }));
    const source = { title: "source", axis: "key" as const, first: 0, words: found.source };
    const target = { title: "target", axis: "query" as const, first: 0, words: found.target };
    const drawn = columns(this.app, this.body, { left: source, right: target }, chosenLinks, 620);
    this.legend.draw(this.app.ramp(1), "weight from a target word to a source word", false);
    const marks = el("p", { class: "marks" }, mark("frame", "framed: the strongest source word of a target word"));
    const key = el("div", { class: "key" }, this.legend.element, marks, el("p", { class: "hint" }, "The stronger a line, the larger its weight."));
    fill(this.body, drawn, this.matrix(found), key);
  }

  private matrix(found: Alignment): SVGSVGElement {
    const { source, target, weight } = found;
    const ramp = this.app.ramp(1);
    const strongest = new Set(found.links.map(String));
    const [left, top] = [130, 120];
    const cells = [...weight.entries()].map(([n, value]) => {
      const [t, s] = [Math.floor(n / source.length), n % source.length];
      const framed = strongest.has(`${s},${t}`) ? " framed" : "";
      return svg(
        "rect",
        {
          x: left + s * CELL,
          y: top + t * CELL,
          width: CELL - 1,
          height: CELL - 1,
          rx: 2,
          fill: ramp.css(value),
          class: `cell${framed}`,
          "data-weight": value,
        },
        svg("title", {}, `${short(target[t], 40)} → ${short(source[s], 40)}: ${number(value)}`),
      );
    });
    const across = source.map((word, s) =>
      svg(
        "text",
        { transform: `translate(${left + (s + 0.5) * CELL + 3}, ${top - 8}) rotate(-58)`, "text-anchor": "start" },
        short(word, 16),
      ),
    );
    const down = target.map((word, t) =>
      svg("text", { x: left - 10, y: top + (t + 0.5) * CELL, dy: "0.34em", "text-anchor": "end" }, short(word, 16)),
    );
    return svg(
      "svg",
      {
        width: left + source.length * CELL + 60,
        height: top + target.length * CELL + 10,
        class: "matrix",
        role: "img",
        "aria-label": "weights between words",
      },
      ...cells,
      ...across,
      ...down,
    );
  }
}

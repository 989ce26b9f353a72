// Images: the picture, coloured where a chosen patch or word looks, for the chosen head large and for every head small.

import { type App, headName, type View, words } from "./app";
import { COLUMNS, fields, within } from "./certainty";
import { Ramp } from "./colours";
import { notice } from "./controls";
import { el, fill } from "./element";
import { visible } from "./glyphs";
import { Legend, number } from "./legend";
import type { Token } from "./marks";
import { several } from "./several";
import type { Head, Links, Picture } from "./source";
import type { State } from "./state";

const LARGE_PIXELS = 4; // a pixel of the picture that takes as many on screen is drawn as a square

export class ImagesView implements View {
  readonly keys: Record<string, () => void> = {
    ArrowLeft: () => this.step(-1),
    ArrowRight: () => this.step(1),
    ArrowUp: () => this.step(-(this.patches?.cols ?? 1)),
    ArrowDown: () => this.step(this.patches?.cols ?? 1),
  };
  private readonly large = el("canvas", { class: "picture", role: "img", "aria-label": "picture with attention" });
  private readonly note = el("output", { class: "faint" });
  private readonly askers = el("div", { class: "askers", role: "group", "aria-label": "who looks" });
  private readonly heads = el("div", { class: "heads" });
  private readonly legend = new Legend();
  private readonly body = el("div", { class: "images" });
  private stop = new AbortController();
  private image: HTMLImageElement | null = null;
  private grey: HTMLCanvasElement | null = null;
  private opened = "";
  private asked = "";
  private links = new Map<Head, Links>();
  private tokens: Token[] | null = null;

  constructor(
    private readonly app: App,
    host: HTMLElement,
  ) {
    fill(host, this.body);
    this.large.addEventListener("pointermove", (event) => this.point(event));
    this.large.addEventListener("click", (event) => this.pick(event));
  }

  update(state: State): void {
    void this.show(state).catch((error: unknown) => {
      const text = words(error);
      if (text) this.note.textContent = text;
    });
  }

  close(): void {
    this.stop.abort();
  }

  table(): string[][] {
    const rows = [["head", "patch row", "patch column", "weight", ...COLUMNS]];
    const { patches } = this;
    for (const [head, links] of this.links) {
      const { weight } = links;
      for (let n = patches?.special ?? 0; patches && n < weight.length; n++) {
        const at = n - patches.special;
        rows.push([
          headName(this.app.layer, head),
          String(Math.floor(at / patches.cols)),
          String(at % patches.cols),
          String(weight[n]),
          ...fields(links),
        ]);
      }
    }
    return rows;
  }

  /** The picture of the keys. */
  private get patches(): Picture | null {
    const at = this.app.picture("key");
    return at === null ? null : this.app.capture.pictures[at];
  }

  private get query(): number {
    const { chosen, axis } = this.app.state;
    return axis === "query" && chosen ? chosen[0] : 0;
  }

  private async show(state: State): Promise<void> {
    const picture = this.app.picture("key");
    if (picture === null) {
      const found = this.app.capture.layers.findIndex((layer) => layer.picture.some(([, key]) => key !== null));
      if (found >= 0) return this.app.go({ layer: found }, "slide");
      return fill(
        this.body,
        notice("This capture holds no picture. Give a tape one when capturing a ViT or a captioner."),
      );
    }
    this.app.mustHaveWeights();
    const { place, layer } = this.app;
    const key = `${state.capture} ${picture}`;
    if (key !== this.opened) {
      this.opened = key;
      const image = new Image();
      image.src = await this.app.source.picture(state.capture, picture);
      await image.decode();
      this.image = image;
      this.grey = inGrey(image);
      fill(
        this.body,
        el(
          "div",
          { class: "subject" },
          el("figure", {}, this.large, el("figcaption", {}, this.note)),
          this.legend.element,
          el("p", { class: "hint" }, "Each picture has the scale of its own strongest patch. Framed: the patch that looks."),
          this.askers,
        ),
        this.heads,
      );
    }
    const ask = JSON.stringify([place, this.query, state.head]);
    if (ask !== this.asked) {
      this.asked = ask;
      this.stop.abort();
      this.stop = new AbortController();
      const { signal } = this.stop;
      this.tokens = await this.app.tokens(place, "query");
      this.list();
      const wanted: Head[] = [state.head, ...[...layer.heads.keys()].filter((head) => head !== state.head)];
      const found = new Map<Head, Links>();
      const work = async (head: Head): Promise<void> =>
        void found.set(head, await this.app.source.token(place, head, "query", this.query, this.query, signal));
      await several(wanted, work, () => !signal.aborted);
      if (signal.aborted) return;
      this.links = found;
    }
    this.draw();
  }

  private draw(): void {
    const { state, layer } = this.app;
    const ramp = this.paint(this.large, state.head, 480);
    if (ramp) this.legend.draw(ramp, "weight of a patch in the large picture", false);
    const cells = layer.heads.map((_, n) => {
      const canvas = el("canvas");
      this.paint(canvas, n, 132);
      const about = headName(layer, n);
      return el(
        "button",
        {
          type: "button",
          class: `head${n === state.head ? " current" : ""}`,
          "aria-label": about,
          title: about,
          onclick: () => this.app.go({ head: n }),
        },
        el("span", { class: "thumb" }, canvas),
        el("span", { class: "name" }, about),
      );
    });
    fill(this.heads, this.plain(), ...cells);
  }

  /** The picture itself, in its colours. */
  private plain(): HTMLElement | null {
    const { patches, image } = this;
    if (!patches || !image) return null;
    const canvas = el("canvas");
    drawn(canvas, image, patches, 132);
    return el("div", { class: "head" }, el("span", { class: "thumb" }, canvas), el("span", { class: "name" }, "the picture"));
  }

  /** The picture in grey under the weights of its patches, the asking patch framed. */
  private paint(canvas: HTMLCanvasElement, head: Head, size: number): Ramp | null {
    const { patches, grey } = this;
    const links = this.links.get(head);
    if (!patches || !grey || !links) return null;
    const context = drawn(canvas, grey, patches, size);
    const weights = links.weight.subarray(patches.special);
    const ramp = new Ramp(
      this.app.state.palette,
      "dark",
      this.app.state.scale,
      weights.reduce((most, value) => Math.max(most, value || 0), 1e-9),
      false,
    );
    const [wide, high] = [canvas.width / patches.cols, canvas.height / patches.rows];
    for (let n = 0; n < Math.min(weights.length, patches.rows * patches.cols); n++) {
      const strength = ramp.place(weights[n] || 0);
      context.globalAlpha = 0.12 + 0.74 * strength;
      context.fillStyle = ramp.css(weights[n] || 0);
      const [x, y] = [Math.round((n % patches.cols) * wide), Math.round(Math.floor(n / patches.cols) * high)];
      context.fillRect(
        x,
        y,
        Math.round(((n % patches.cols) + 1) * wide) - x,
        Math.round((Math.floor(n / patches.cols) + 1) * high) - y,
      );
    }
    context.globalAlpha = 1;
    const own = this.app.picture("query") === this.app.picture("key") ? this.query - patches.special : -1;
    if (own < 0) return ramp;
    context.strokeStyle = "#ffffff";
    context.lineWidth = Math.max(1.5, canvas.width / 200);
    context.strokeRect((own % patches.cols) * wide, Math.floor(own / patches.cols) * high, wide, high);
    return ramp;
  }

  /** Buttons for queries that are not patches of the picture: words of a caption, special tokens. */
  private list(): void {
    const { layer, patches } = { layer: this.app.layer, patches: this.patches };
    const own = this.app.picture("query") === this.app.picture("key");
    const count = own ? (patches?.special ?? 0) : layer.n_i;
    const name = (n: number): string =>
      this.tokens?.[n]
        ? visible(this.tokens[n].text)
        : own
          ? count === 1
            ? "class token"
            : `special ${n}`
          : `query ${n}`;
    const buttons = Array.from({ length: Math.min(count, 400) }, (_, n) =>
      el(
        "button",
        {
          type: "button",
          class: "asker",
          "aria-pressed": String(n === this.query),
          "data-n": n,
          onclick: () => this.choose(n),
        },
        el("bdi", {}, name(n)),
      ),
    );
    fill(this.askers, ...buttons, own ? el("p", { class: "hint" }, "Click a patch to see where it looks.") : null);
  }

  private patchAt(event: MouseEvent): number | null {
    const { patches } = this;
    const box = this.large.getBoundingClientRect();
    if (!patches || !box.width) return null;
    const col = Math.floor(((event.clientX - box.left) / box.width) * patches.cols);
    const row = Math.floor(((event.clientY - box.top) / box.height) * patches.rows);
    return row * patches.cols + col + patches.special;
  }

  private point(event: MouseEvent): void {
    const n = this.patchAt(event);
    const { patches } = this;
    const links = this.links.get(this.app.state.head);
    const weight = n === null ? undefined : links?.weight[n];
    if (n === null || !patches || !links || weight === undefined) return;
    const at = n - patches.special;
    const place = `patch ${Math.floor(at / patches.cols)}, ${at % patches.cols}`;
    const known = number(weight) + within(links.error);
    this.note.textContent = `${place}: ${Number.isNaN(weight) ? "not among the links of this page" : known}`;
  }

  private pick(event: MouseEvent): void {
    const n = this.patchAt(event);
    if (n !== null && this.app.picture("query") === this.app.picture("key")) this.choose(n);
  }

  private choose(n: number): void {
    this.app.go({ chosen: [n, n], axis: "query" });
  }

  private step(by: number): void {
    this.choose(Math.max(0, Math.min(this.app.layer.n_i - 1, this.query + by)));
  }
}

/** Draw a picture whose longer side takes `size` pixels. A small one keeps the squares of its pixels. */
function drawn(canvas: HTMLCanvasElement, picture: CanvasImageSource, { width, height }: Picture, size: number): CanvasRenderingContext2D {
  const scale = (size * devicePixelRatio) / Math.max(width, height);
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  canvas.style.width = `${canvas.width / devicePixelRatio}px`;
  const context = canvas.getContext("2d")!;
  context.imageSmoothingEnabled = scale < LARGE_PIXELS;
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return context;
}

function inGrey(image: HTMLImageElement): HTMLCanvasElement {
  const canvas = el("canvas", { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d")!;
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let n = 0; n < pixels.data.length; n += 4) {
    const light = 0.299 * pixels.data[n] + 0.587 * pixels.data[n + 1] + 0.114 * pixels.data[n + 2];
    pixels.data.fill(light, n, n + 3);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

// Running text: laid out chunk by chunk as it comes into view, however long it is, and coloured token by token.

import { el } from "./element";
import type { Token } from "./marks";
import { tokenElement } from "./span";

const CHUNK = 400; // tokens laid out at a time

/** Background and ink of a token, null for the page's own. */
export type Colouring = (n: number) => [string, string] | null;

export class Running {
  readonly element: HTMLElement;
  private readonly chunks: HTMLElement[] = [];
  private readonly watch: IntersectionObserver;
  private readonly scroller: HTMLElement;
  private colour: Colouring | null = null;
  private chosen: [number, number] | null = null;
  private found = new Set<number>();
  /** How strong the line below a token is, up to 1; null without lines. */
  marks: ((n: number) => number) | null = null;
  /** 1 for each token that is a hidden key. */
  hidden: Uint8Array | null = null;

  constructor(
    title: string,
    readonly tokens: Token[],
    choose: (first: number, last: number) => void,
  ) {
    this.scroller = el("div", { class: "running", role: "listbox", tabindex: 0, "aria-label": title || "text" });
    this.element = el("article", {}, title ? el("h2", {}, title) : null, this.scroller);
    this.listen(choose);
    this.watch = new IntersectionObserver(
      (entries) => entries.forEach((entry) => entry.isIntersecting && this.lay(entry.target as HTMLElement)),
      { rootMargin: "600px" },
    );
    for (let first = 0; first < tokens.length; first += CHUNK) {
      const chunk = el("div", { class: "chunk", "data-first": first });
      chunk.style.minHeight = `${Math.ceil(Math.min(CHUNK, tokens.length - first) / 14) * 2}em`;
      this.chunks.push(chunk);
      this.watch.observe(chunk);
    }
    this.scroller.append(...this.chunks);
  }

  close(): void {
    this.watch.disconnect();
  }

  /** Bring a token into view if it is out of it. */
  reveal(n: number): void {
    const chunk = this.chunks[Math.floor(n / CHUNK)];
    if (!chunk) return;
    this.lay(chunk);
    const token = chunk.querySelector(`[data-n="${n}"]`)!;
    const [box, frame] = [token.getBoundingClientRect(), this.scroller.getBoundingClientRect()];
    if (box.top < frame.top || box.bottom > frame.bottom) token.scrollIntoView({ block: "center" });
  }

  /** Colour the text, frame what is chosen and underline what was found. */
  paint(colour: Colouring | null, chosen: [number, number] | null, found: [number, number][]): void {
    [this.colour, this.chosen] = [colour, chosen];
    this.found = new Set(
      found.flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, n) => first + n)),
    );
    for (const token of this.scroller.querySelectorAll<HTMLElement>(".tok")) this.dress(token);
  }

  /** A click chooses a token, a drag or a click with shift a span. */
  private listen(choose: (first: number, last: number) => void): void {
    let from: number | null = null;
    const at = (event: Event): number | null => {
      const token = (event.target as HTMLElement).closest<HTMLElement>(".tok");
      return token ? Number(token.dataset["n"]) : null;
    };
    this.scroller.addEventListener("pointerdown", (event) => {
      if (!event.shiftKey || from === null) from = at(event);
    });
    this.scroller.addEventListener("pointerup", (event) => {
      const to = at(event);
      if (from === null || to === null) return;
      if (from !== to) getSelection()?.removeAllRanges();
      choose(Math.min(from, to), Math.max(from, to));
    });
  }

  private lay(chunk: HTMLElement): void {
    if (chunk.childElementCount) return;
    this.watch.unobserve(chunk);
    chunk.style.minHeight = "";
    const first = Number(chunk.dataset["first"]);
    for (const [at, token] of this.tokens.slice(first, first + CHUNK).entries()) {
      const element = tokenElement(token, first + at);
      this.dress(element);
      if (token.gap) chunk.append(" ");
      chunk.append(element);
      if (token.text.includes("\n")) chunk.append(el("br"));
    }
  }

  private dress(token: HTMLElement): void {
    const n = Number(token.dataset["n"]);
    const [background, ink] = this.colour?.(n) ?? ["", ""];
    token.style.backgroundColor = background;
    token.style.color = ink;
    token.classList.toggle("chosen", this.chosen !== null && n >= this.chosen[0] && n <= this.chosen[1]);
    token.classList.toggle("hidden-key", this.hidden?.[n] === 1);
    token.classList.toggle("found", this.found.has(n));
    const share = this.marks?.(n) ?? NaN;
    token.classList.toggle("marked", share >= 0);
    if (share >= 0) token.style.setProperty("--surprise", share.toFixed(3));
  }
}

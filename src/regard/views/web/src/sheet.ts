// Sheet: one canvas for the maps of all heads near the screen. A browser composes each canvas of a page by itself, in
// every frame, and for hundreds of them this takes seconds.

import { el, fill } from "./element";

const MARGIN = 0.5; // of the screen beyond each of its edges: what is seen next

/** Where a picture is shown, and the row which that is a part of. */
export interface Placed {
  row: Element;
  place: Element;
  picture: CanvasImageSource;
}

export class Sheet {
  readonly element = el("div", { class: "sheet", "aria-hidden": "true" });
  private readonly canvas = el("canvas");

  /** A sheet behind what is in `content`, which scrolls in `host`. */
  constructor(
    private readonly host: Element,
    private readonly content: Element,
  ) {
    fill(this.element, this.canvas);
  }

  /** Draw pictures where their elements are now, as far as they are near the screen. */
  paint(pictures: Iterable<Placed>): void {
    const screen = this.host.getBoundingClientRect();
    const [across, down] = [MARGIN * screen.width, MARGIN * screen.height];
    const isNear = (box: DOMRect): boolean =>
      box.right >= screen.left - across && box.left <= screen.right + across && box.bottom >= screen.top - down && box.top <= screen.bottom + down;
    const rows = new Map<Element, boolean>(); // the browser does not arrange what is in a row far away, unless it is asked
    const found: [DOMRect, CanvasImageSource][] = [];
    const edges = { left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity };
    for (const { row, place, picture } of pictures) {
      if (!rows.has(row)) rows.set(row, isNear(row.getBoundingClientRect()));
      if (!rows.get(row)) continue;
      const box = place.getBoundingClientRect();
      if (!isNear(box)) continue;
      found.push([box, picture]);
      edges.left = Math.min(edges.left, box.left);
      edges.top = Math.min(edges.top, box.top);
      edges.right = Math.max(edges.right, box.right);
      edges.bottom = Math.max(edges.bottom, box.bottom);
    }
    this.element.hidden = !found.length;
    if (!found.length) return;
    const origin = this.content.getBoundingClientRect();
    const [width, height] = [edges.right - edges.left, edges.bottom - edges.top];
    const ratio = window.devicePixelRatio || 1;
    const size = [Math.ceil(width * ratio), Math.ceil(height * ratio)];
    const { style } = this.canvas;
    [style.left, style.top] = [`${edges.left - origin.left}px`, `${edges.top - origin.top}px`];
    [style.width, style.height] = [`${size[0] / ratio}px`, `${size[1] / ratio}px`];
    [this.canvas.width, this.canvas.height] = size; // this clears it, too
    const context = this.canvas.getContext("2d")!;
    context.imageSmoothingEnabled = false;
    for (const [box, picture] of found) {
      const [left, top] = [Math.round((box.left - edges.left) * ratio), Math.round((box.top - edges.top) * ratio)];
      context.drawImage(picture, left, top, Math.round(box.width * ratio), Math.round(box.height * ratio));
    }
  }
}

// Elements built by hand: text enters as text nodes only, styles through classes and CSSOM, as the policy demands.

export type Child = Node | string | number | null | undefined | false;
type Value = string | number | boolean | null | undefined | ((event: never) => void);
export type Attributes = Record<string, Value>;

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: `el("button", { class: "chip", onclick: go }, "mean")`. */
export function el<K extends keyof HTMLElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return filled(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function svg<K extends keyof SVGElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

/** Replace what an element holds. */
export function fill(element: Element, ...children: Child[]): void {
  element.replaceChildren(...present(children));
}

/** Put elements into a parent in this order: those in place already are not touched, and others are removed. */
export function arrange(parent: Element, children: readonly Element[]): void {
  const wanted = new Set(children);
  for (const child of [...parent.childNodes]) if (!wanted.has(child as Element)) child.remove();
  let next = parent.firstChild;
  for (const child of children) {
    if (child === next) next = next.nextSibling;
    else parent.insertBefore(child, next);
  }
}

function present(children: Child[]): (Node | string)[] {
  return children
    .filter((child): child is Node | string | number => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "number" ? String(child) : child));
}

/** A canvas with a backing store of `ratio` device pixels a CSS pixel, scaled so that drawing is in CSS pixels. */
export function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  const [across, down] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
  if (canvas.style.width !== `${width}px`) canvas.style.width = `${width}px`;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

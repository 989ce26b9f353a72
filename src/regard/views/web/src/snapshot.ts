// Snapshot: what is on screen as one SVG, read from the page itself, so that every view can be exported as it looks.

import { svg } from "./element";

const PRESENTATION = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "stroke-dasharray",
  "opacity",
  "font-size",
  "font-family",
  "font-weight",
  "text-anchor",
];

/** An element and all it shows as a drawing that needs nothing else. */
export function snapshot(stage: HTMLElement): SVGSVGElement {
  const frame = stage.getBoundingClientRect();
  const drawing = svg("svg", {
    xmlns: "http://www.w3.org/2000/svg",
    width: frame.width,
    height: frame.height,
    viewBox: `0 0 ${frame.width} ${frame.height}`,
  });
  drawing.append(
    svg("rect", { width: frame.width, height: frame.height, fill: getComputedStyle(document.body).backgroundColor }),
  );
  draw(stage, drawing, frame);
  return drawing;
}

/** The drawing as the text of a file. */
export function source(drawing: SVGSVGElement): string {
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(drawing)}\n`;
}

/** The drawing as pixels, two for each of the page's. */
export async function pixels(drawing: SVGSVGElement): Promise<Blob> {
  const address = URL.createObjectURL(new Blob([source(drawing)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [
      2 * Number(drawing.getAttribute("width")),
      2 * Number(drawing.getAttribute("height")),
    ];
    canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise<Blob>((resolve, reject) =>
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the picture is too large"))), "image/png"),
    );
  } finally {
    URL.revokeObjectURL(address);
  }
}

function draw(node: Element, into: SVGElement, frame: DOMRect): void {
  const box = node.getBoundingClientRect();
  const style = getComputedStyle(node);
  if (style.display === "none" || style.visibility === "hidden" || node.classList.contains("sr")) return;
  if (box.bottom < frame.top || box.top > frame.bottom || box.right < frame.left || box.left > frame.right) return;
  const place = placed(box, frame);
  if (node instanceof SVGSVGElement) return void into.append(copied(node, place));
  if (node instanceof HTMLCanvasElement) return void picture(node, style, place, into);
  const group = svg("g", style.opacity === "1" ? {} : { opacity: style.opacity });
  into.append(group);
  surface(node, style, frame, group);
  const inner = style.overflow === "visible" ? group : clipped(place, group);
  for (const child of node.childNodes) {
    if (child instanceof Element) draw(child, inner, frame);
    else if (child instanceof Text) write(child, style, frame, inner);
  }
  if (!group.childElementCount) group.remove();
}

type Box = { x: number; y: number; width: number; height: number };

/** Background, border and outline, of each line that an inline element is broken into. */
function surface(node: Element, style: CSSStyleDeclaration, frame: DOMRect, into: SVGElement): void {
  const border = style.borderBottomStyle !== "none" && parseFloat(style.borderBottomWidth) > 0;
  const outline = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  const round = border && style.borderTopStyle !== "none";
  const edge = round ? style.borderTopColor : outline ? style.outlineColor : "none";
  const width = round ? style.borderTopWidth : style.outlineWidth;
  const fill = clear(style.backgroundColor) ? "none" : style.backgroundColor;
  if (fill === "none" && (edge === "none" || clear(edge))) return;
  const look = {
    fill,
    stroke: edge,
    "stroke-width": parseFloat(width),
    rx: parseFloat(style.borderTopLeftRadius) || 0,
  };
  const boxes = style.display === "inline" ? [...node.getClientRects()] : [node.getBoundingClientRect()];
  for (const box of boxes) into.append(svg("rect", { ...placed(box, frame), ...look }));
}

function placed(box: DOMRect, frame: DOMRect): Box {
  return { x: box.left - frame.left, y: box.top - frame.top, width: box.width, height: box.height };
}

function clear(colour: string): boolean {
  return colour === "transparent" || /,\s*0\)$/.test(colour);
}

let clips = 0;

function clipped(place: Box, into: SVGElement): SVGElement {
  const id = `clip${++clips}`;
  const group = svg("g", { "clip-path": `url(#${id})` });
  into.append(svg("clipPath", { id }, svg("rect", place)), group);
  return group;
}

function picture(canvas: HTMLCanvasElement, style: CSSStyleDeclaration, place: Box, into: SVGElement): void {
  if (!canvas.width || !canvas.height || !place.width || !place.height) return;
  into.append(
    svg("image", {
      ...place,
      href: canvas.toDataURL(),
      preserveAspectRatio: "none",
      "image-rendering": style.imageRendering === "pixelated" ? "pixelated" : null,
    }),
  );
}

/** A text node, line by line as it is broken on screen. */
function write(text: Text, style: CSSStyleDeclaration, frame: DOMRect, into: SVGElement): void {
  if (!text.data.trim()) return;
  const range = document.createRange();
  let [from, top] = [0, NaN];
  const flush = (to: number): void => {
    const part = text.data.slice(from, to);
    range.setStart(text, from + (part.length - part.trimStart().length));
    range.setEnd(text, from + part.trimEnd().length);
    from = to;
    const box = range.getBoundingClientRect();
    if (!part.trim() || !box.width || box.top > frame.bottom || box.bottom < frame.top) return;
    const size = parseFloat(style.fontSize);
    const place = { x: box.left - frame.left, y: box.top - frame.top + box.height / 2 + 0.35 * size };
    const look = {
      fill: style.color,
      "font-size": size,
      "font-family": style.fontFamily,
      "font-weight": style.fontWeight,
    };
    into.append(svg("text", { ...place, ...look }, part.trim()));
  };
  for (let n = 0; n < text.length; n++) {
    range.setStart(text, n);
    range.setEnd(text, n + 1);
    const box = range.getClientRects()[0];
    if (!box) continue;
    if (n > from && Math.abs(box.top - top) > 4) flush(n);
    top = box.top;
  }
  flush(text.length);
}

/** A drawing within the drawing, with the style sheet's say written into it. */
function copied(node: SVGSVGElement, place: Box): SVGElement {
  const copy = node.cloneNode(true) as SVGSVGElement;
  const [theirs, ours] = [node.querySelectorAll("*"), copy.querySelectorAll("*")];
  theirs.forEach((original, n) => {
    const style = getComputedStyle(original);
    if (style.display === "none") ours[n].setAttribute("display", "none");
    for (const name of PRESENTATION) {
      const value = style.getPropertyValue(name);
      if (value && !(value === "1" && name === "opacity")) ours[n].setAttribute(name, value);
    }
    for (const name of ["class", "tabindex", "role"]) ours[n].removeAttribute(name);
  });
  for (const [name, value] of Object.entries(place)) copy.setAttribute(name, String(value));
  copy.removeAttribute("class");
  return copy;
}

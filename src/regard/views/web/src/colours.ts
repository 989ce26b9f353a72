// Colours of weights: perceptually uniform ramps that begin at the page's own paper, under a scale and a range.

import { interpolateMagma, interpolateRdBu, interpolateViridis } from "d3-scale-chromatic";

export type Scale = "linear" | "sqrt" | "log";
export type Palette = "magma" | "viridis" | "grey";
export type Theme = "light" | "dark";
type Colour = [number, number, number];

export const SCALES: Scale[] = ["linear", "sqrt", "log"];
export const PALETTES: Palette[] = ["magma", "viridis", "grey"];
export const PAPER: Record<Theme, Colour> = { light: [255, 255, 255], dark: [13, 13, 18] };
const NO_NUMBER: Colour = [159, 180, 192];
const DECADES = 4; // of a logarithmic scale
const STEPS = 512;

/** Values to colours. Differences run both ways from the paper; all else runs up from it. */
export class Ramp {
  private readonly table: Uint8ClampedArray;

  constructor(
    readonly palette: Palette,
    readonly theme: Theme,
    readonly scale: Scale,
    /** The value drawn strongest. */
    readonly most: number,
    readonly signed: boolean,
  ) {
    this.table = table(palette, theme, signed);
  }

  /** Where a value stands on the ramp, from 0 to 1. */
  place(value: number): number {
    const share = strength(Math.abs(value) / this.most, this.scale);
    return this.signed ? 0.5 + (Math.sign(value) * share) / 2 : share;
  }

  css(value: number): string {
    const at = this.step(value);
    return `rgb(${this.table[at]}, ${this.table[at + 1]}, ${this.table[at + 2]})`;
  }

  /** Ink that can be read on a value's colour: of black and white the one with more contrast, which is at least 4.5. */
  ink(value: number): string {
    const at = this.step(value);
    const linear = (byte: number): number => (byte <= 10 ? byte / 3295 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...this.table.subarray(at, at + 3)].map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
  }

  /** Pixels of a matrix, a pixel a value. */
  pixels(values: Float32Array, rows: number, cols: number): ImageData {
    const image = new ImageData(cols, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const table = new Uint32Array(this.table.buffer);
    const { scale, signed, most } = this;
    for (let n = 0; n < pixels.length; n++) {
      const value = values[n] / most;
      const share = strength(value < 0 ? -value : value, scale);
      const at = signed ? 0.5 + (value < 0 ? -share : share) / 2 : share;
      pixels[n] = table[Number.isNaN(value) ? STEPS : (at * (STEPS - 1) + 0.5) | 0];
    }
    return image;
  }

  private step(value: number): number {
    return 4 * (Number.isNaN(value) ? STEPS : Math.round(this.place(value) * (STEPS - 1)));
  }
}

/** How strongly a share of the largest value is drawn. */
export function strength(share: number, scale: Scale): number {
  if (!(share > 0)) return 0;
  if (share >= 1) return 1;
  if (scale === "linear") return share;
  return scale === "sqrt" ? Math.sqrt(share) : Math.max(0, 1 + Math.log10(share) / DECADES);
}

/** The value at a place of the ramp, `strength` turned round. */
export function valueAt(place: number, scale: Scale): number {
  if (scale === "linear") return place;
  return scale === "sqrt" ? place * place : 10 ** ((place - 1) * DECADES);
}

/** A quantile of the values' sizes, read from a histogram of their logarithms: fast enough for every pause of a pan. */
export class Spread {
  private readonly counts = new Uint32Array(1024);
  private total = 0;
  private most = 0;

  add(values: Float32Array): void {
    for (let n = 0; n < values.length; n++) {
      const value = Math.abs(values[n]);
      if (!(value >= 1e-12)) continue;
      if (value > this.most) this.most = value;
      this.counts[Math.min(1023, Math.floor((Math.log2(value) + 44) * 20))]++;
      this.total++;
    }
  }

  quantile(share: number): number | null {
    let above = this.total * (1 - share);
    for (let n = 1023; n >= 0; n--) {
      above -= this.counts[n];
      if (this.counts[n] && above <= 0) return Math.min(Math.max(1, this.most), 2 ** ((n + 1) / 20 - 44));
    }
    return null;
  }
}

const tables = new Map<string, Uint8ClampedArray>();

/** The colours of a ramp in equal steps, and last that of what is no number. */
function table(palette: Palette, theme: Theme, signed: boolean): Uint8ClampedArray {
  const name = `${signed || palette} ${theme}`;
  let found = tables.get(name);
  if (!found) {
    const colour = signed ? bothWays(theme) : upwards(palette, theme);
    found = new Uint8ClampedArray(4 * STEPS + 4);
    for (let n = 0; n < STEPS; n++) found.set([...colour(n / (STEPS - 1)), 255], 4 * n);
    found.set([...NO_NUMBER, 255], 4 * STEPS);
    tables.set(name, found);
  }
  return found;
}

function upwards(palette: Palette, theme: Theme): (t: number) => Colour {
  const paper = PAPER[theme];
  const dark = theme === "dark";
  if (palette === "grey") return (t) => mix(paper, dark ? [250, 250, 250] : [12, 12, 16], t);
  const inner = palette === "magma" ? interpolateMagma : interpolateViridis;
  // Ramps run from dark to light; on white paper they are turned round, and both ends of paper are blended in.
  return (t) => {
    const at = dark ? 0.02 + 0.98 * t : 1 - t;
    return mix(
      paper,
      rgb(inner(palette === "magma" && !dark ? 0.06 + 0.94 * at : at)),
      Math.min(1, t / (dark ? 0.08 : 0.2)),
    );
  };
}

function bothWays(theme: Theme): (t: number) => Colour {
  if (theme === "light")
    return (t) => mix(PAPER.light, rgb(interpolateRdBu(1 - t)), Math.min(1, Math.abs(t - 0.5) / 0.06));
  const [cold, warm]: Colour[] = [
    [92, 190, 255],
    [255, 120, 92],
  ];
  return (t) => mix(PAPER.dark, t < 0.5 ? cold : warm, Math.abs(2 * t - 1));
}

function mix(from: Colour, to: Colour, share: number): Colour {
  return [0, 1, 2].map((n) => from[n] + (to[n] - from[n]) * share) as Colour;
}

function rgb(colour: string): Colour {
  if (colour.startsWith("#")) return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)) as Colour;
  return colour.match(/\d+/g)!.map(Number) as Colour;
}

const LIGHTNESS: Record<Theme, number[]> = { light: [0.56, 0.34, 0.48], dark: [0.72, 0.9, 0.8] };

/** A colour for each head: evenly spaced hues, and another lightness than its neighbours, for eyes that confuse hues. */
export function headColour(head: number, heads: number, theme: Theme): string {
  const hue = (25 + (360 * head) / Math.max(heads, 1)) % 360;
  const lightness = LIGHTNESS[theme][head % 3];
  return `oklch(${lightness} ${theme === "dark" ? 0.13 : 0.16} ${hue.toFixed(1)})`;
}

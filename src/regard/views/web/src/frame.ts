// Frames: arrays of numbers behind a JSON header, as the server sends them and pages hold them.

import { type Certainty, EXACT } from "./certainty";

type Codes = Float32Array | Int16Array | Uint8Array | Uint16Array | Uint32Array | Int32Array;

interface Entry {
  name: string;
  type: keyof typeof TYPES;
  shape: number[];
  steps?: number;
  range?: [number, number];
}

const TYPES = { f4: Float32Array, i2: Int16Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array };

/** An array as it travelled: kept in its codes, which are a quarter of the numbers' bytes. */
export class Coded {
  readonly shape: number[];

  constructor(
    private readonly codes: Codes,
    private readonly entry: Entry,
  ) {
    this.shape = entry.shape;
  }

  get bytes(): number {
    return this.codes.byteLength;
  }

  /** How far a number may be off where it is coded between two ends, not relative to itself. */
  get off(): number {
    const { range } = this.entry;
    return range ? (range[1] - range[0]) / 508 : 0;
  }

  /** The numbers, or a range of them. */
  values(from = 0, to = this.codes.length): Float32Array {
    const codes = this.codes.subarray(from, to);
    if (codes instanceof Float32Array) return codes;
    const table = decoding(this.entry);
    if (!table) return Float32Array.from(codes);
    const found = new Float32Array(codes.length);
    for (let n = 0; n < codes.length; n++) found[n] = table[codes[n] & 0xffff];
    return found;
  }

  /** One of the numbers. */
  at(n: number): number {
    const table = this.codes instanceof Float32Array ? null : decoding(this.entry);
    return table ? table[this.codes[n] & 0xffff] : this.codes[n];
  }

  static of(values: Float32Array, shape: number[]): Coded {
    return new Coded(values, { name: "", type: "f4", shape });
  }
}

export class Frame {
  constructor(
    readonly header: Record<string, unknown>,
    private readonly arrays: Map<string, Coded>,
  ) {}

  has(name: string): boolean {
    return this.arrays.has(name);
  }

  coded(name: string): Coded {
    const found = this.arrays.get(name);
    if (!found) throw new Error(`the answer holds no ${name}`);
    return found;
  }

  values(name: string): Float32Array {
    return this.coded(name).values();
  }

  get certainty(): Certainty {
    const { state, error, retry, of } = { ...EXACT, ...(this.header as Partial<Certainty>) };
    return { state, error, retry, of };
  }
}

/** A frame from its bytes. */
export function parse(bytes: ArrayBuffer): Frame {
  const size = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size))) as Record<string, unknown>;
  const arrays = new Map<string, Coded>();
  let at = 4 + size;
  for (const entry of header["arrays"] as Entry[]) {
    const kind = TYPES[entry.type];
    const count = entry.shape.reduce((product, n) => product * n, 1);
    arrays.set(entry.name, new Coded(new kind(bytes, at, count), entry));
    at += Math.ceil((count * kind.BYTES_PER_ELEMENT) / 8) * 8;
  }
  return new Frame(header, arrays);
}

const tables = new Map<string, Float32Array>();

/** The number of each code, `codes & 0xffff` being the place of a negative one; null where codes are the numbers. */
function decoding({ type, steps, range }: Entry): Float32Array | null {
  if (steps === undefined && range === undefined) return null;
  const name = `${type} ${steps} ${range}`;
  let table = tables.get(name);
  if (!table) {
    const [count, none] = type === "u1" ? [256, 255] : [65536, 32768]; // codes, and that of what is no number
    table = new Float32Array(count);
    for (let n = 0; n < count; n++)
      table[n] = range ? range[0] + ((range[1] - range[0]) * n) / 254 : power(n, type, steps!);
    table[none] = NaN;
    if (!range) tables.set(name, table);
  }
  return table;
}

function power(place: number, type: Entry["type"], steps: number): number {
  if (type === "u1") return place ? 2 ** ((place - 254) / steps) : 0;
  const code = place < 32768 ? place : place - 65536;
  return code ? Math.sign(code) * 2 ** ((Math.abs(code) - 32767) / steps) : 0;
}

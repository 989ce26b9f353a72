// What tokenizers write into tokens about the spaces around them, taken out again: Ġ, ▁, ## and byte alphabets.

export interface Token {
  /** As the tokenizer has it. */
  raw: string;
  /** As a reader would have it. */
  text: string;
  /** A space stands before it. */
  gap: boolean;
}

/** Tokens as they read, by the marks of WordPiece, SentencePiece and byte-level BPE; bare tokens are words. */
export function readable(tokens: string[]): Token[] {
  const some = (mark: string): boolean => tokens.some((token) => token.length > mark.length && token.startsWith(mark));
  if (some("##")) return tokens.map(wordPiece);
  if (some("Ġ")) return tokens.map((raw) => marked(raw, "Ġ", fromByteAlphabet));
  if (some("▁")) return tokens.map((raw) => marked(raw, "▁", (text) => (text === "<0x0A>" ? "\n" : text)));
  if (some(" ")) return tokens.map((raw) => marked(raw, " ", (text) => text));
  const letters = tokens.every((token) => [...token].length <= 1);
  return tokens.map((raw) => ({ raw, text: raw, gap: !letters }));
}

/** The tokens of two texts at the same positions, or of their partners: both, apart by a bar, where they differ. */
export function joined(
  one: Token[] | null,
  other: Token[] | null,
  partner: (n: number) => number | null = (n) => n,
): Token[] | null {
  if (!one || !other) return one ?? other;
  const found = (n: number): Token | undefined => {
    const at = partner(n);
    return at === null ? undefined : other[at];
  };
  const pair = (a: Token, b: Token): Token =>
    a.raw === b.raw ? a : { raw: `${a.raw} | ${b.raw}`, text: `${a.text} | ${b.text}`, gap: true };
  return one.map((token, n) => {
    const same = found(n);
    return same ? pair(token, same) : token;
  });
}

function wordPiece(raw: string): Token {
  const goesOn = raw.length > 2 && raw.startsWith("##");
  return { raw, text: goesOn ? raw.slice(2) : raw, gap: !goesOn && !/^[.,;:!?)\]}'\u2019\u201d%]$/.test(raw) };
}

function marked(raw: string, mark: string, read: (text: string) => string): Token {
  const gap = raw.length > 1 && raw.startsWith(mark);
  return { raw, text: read(gap ? raw.slice(1) : raw), gap };
}

/** Bytes of byte-level BPE back to UTF-8; a piece of a character, or anything else, stays as it is. */
function fromByteAlphabet(text: string): string {
  const bytes: number[] = [];
  for (const char of text) {
    const byte = BYTES.get(char);
    if (byte === undefined) return text;
    bytes.push(byte);
  }
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return text;
  }
}

/** The alphabet of Radford et al. 2019: printable bytes stand for themselves, the others follow from U+0100. */
const BYTES = ((): Map<string, number> => {
  const alphabet = new Map<string, number>();
  let next = 0x100;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    alphabet.set(String.fromCodePoint(printable ? byte : next++), byte);
  }
  return alphabet;
})();

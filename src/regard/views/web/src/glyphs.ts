// Token text that can be seen: no character is invisible, reorders its neighbours or breaks a line unannounced.

const PICTURES: Record<string, string> = { "\n": "↵", "\r": "␍", "\t": "⇥", "\u007f": "␡" };
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/u;
const SPACE = /^\p{Zs}$/u;
const LONGEST = 400; // characters of a token that are shown

export interface Piece {
  text: string;
  /** An escape that stands for a character which has no look of its own. */
  escape: boolean;
}

/** A token as pieces to draw: ordinary text, and escapes such as ␀, ↵ or U+202E.
 *
 * Emoji keep their joiners and selectors, which are hidden characters in a visible cluster. */
export function pieces(token: string): Piece[] {
  const found: Piece[] = [];
  const add = (text: string, escape: boolean): void => {
    const last = found[found.length - 1];
    if (last && !last.escape && !escape) last.text += text;
    else found.push({ text, escape });
  };
  const clusters = [...segments(cut(token))];
  for (const [n, cluster] of clusters.entries()) {
    if (/\p{Extended_Pictographic}/u.test(cluster) && !/[\p{Cc}\p{Bidi_Control}]/u.test(cluster)) add(cluster, false);
    else for (const char of cluster) addCharacter(char, n, clusters.length, add);
  }
  if (!found.length) add("∅", true);
  const more = token.length - cut(token).length;
  if (more > 0) add(`… ${more.toLocaleString("en")} more characters`, true);
  return found;
}

/** The beginning of a token of any length, a pair of surrogates left whole. */
function cut(token: string): string {
  if (token.length <= LONGEST) return token;
  const high = /[\ud800-\udbff]/.test(token[LONGEST - 1]);
  return token.slice(0, high ? LONGEST - 1 : LONGEST);
}

function addCharacter(char: string, n: number, count: number, add: (text: string, escape: boolean) => void): void {
  if (HIDDEN.test(char)) add(escaped(char), true);
  else if (SPACE.test(char) && char !== " ") add(escaped(char), true);
  else if (char === " ") n === 0 || n === count - 1 ? add("␣", true) : add(" ", false);
  else add(char, false);
}

/** The same as one string, for axes, titles and files. */
export function visible(token: string): string {
  const text = pieces(token)
    .map((piece) => piece.text)
    .join("");
  return text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text;
}

/** A token cut to so many characters. */
export function short(token: string, length: number): string {
  const text = [...visible(token)];
  return text.length > length ? `${text.slice(0, length - 1).join("")}…` : text.join("");
}

function escaped(char: string): string {
  const code = char.codePointAt(0)!;
  if (PICTURES[char]) return PICTURES[char];
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

const segmenter = new Intl.Segmenter(undefined, { granularity: "grapheme" });

function* segments(text: string): Iterable<string> {
  for (const { segment } of segmenter.segment(text)) yield segment;
}

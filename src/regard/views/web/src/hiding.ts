// Hiding: which keys are hidden, as the address spells them, and what the words for them are.

import type { App } from "./app";
import { el } from "./element";
import { CONTROLS } from "./glossary";
import { visible } from "./glyphs";
import type { Token } from "./marks";
import type { Hidden, Place, Range } from "./source";

const KINDS = ["sinks", "padding", "punctuation"] as const;
export type Kind = (typeof KINDS)[number];
/** What the key for hiding hides. */
const USUAL = "sinks,padding";
const NAMED = 3; // tokens that are named

/** Whether this is a kind, or a range of keys. */
export function isPart(text: string): boolean {
  return (KINDS as readonly string[]).includes(text) || /^\d{1,9}(-\d{1,9})?$/.test(text);
}

/** The state after the key for hiding: as usual, or nothing. */
export function toggledAll(hide: string): string {
  return hide ? "" : USUAL;
}

/** The state after a part is hidden, or shown again. */
export function toggledPart(hide: string, part: string): string {
  const parts = hide.split(",").filter(Boolean);
  return (parts.includes(part) ? parts.filter((one) => one !== part) : [...parts, part]).join(",");
}

/** A range of keys as the state spells it. */
export function spelled([first, last]: Range): string {
  return first === last ? String(first) : `${first}-${last}`;
}

/** The ranges that a part of the state hides. */
function ranges(part: string, known: Hidden): Range[] {
  if ((KINDS as readonly string[]).includes(part)) return known[part as Kind] ?? [];
  const [first, last] = part.split("-").map(Number);
  return [[first, last ?? first]];
}

/** Which of some keys are hidden. */
export function flags(hide: string, known: Hidden, count: number): Uint8Array {
  const hidden = new Uint8Array(count);
  for (const part of hide.split(",").filter(Boolean)) {
    for (const [first, last] of ranges(part, known)) hidden.fill(1, first, last + 1);
  }
  return hidden;
}

/** Buttons for what can be hidden. */
export function tools(app: App): HTMLElement {
  const { hide, chosen, axis } = app.state;
  const button = (part: string, text: string, about: string): HTMLElement =>
    el(
      "button",
      {
        type: "button",
        "data-control": `hide:${part}`,
        "aria-pressed": String(hide.split(",").includes(part)),
        title: about,
        onclick: () => app.go({ hide: toggledPart(hide, part) }),
      },
      text,
    );
  const own = hide.split(",").filter((part) => /^\d/.test(part));
  const more = chosen && (axis === "key" || app.layer.self) ? spelled(asKeys(app, chosen)) : null;
  const numbered = [...new Set(more ? [...own, more] : own)];
  return el(
    "div",
    { class: "labelled", title: CONTROLS.hide },
    el("span", {}, "hide"),
    el(
      "div",
      { class: "choice", role: "group", "aria-label": "hide" },
      button("sinks", "sinks", "keys that receive more than 0.3 of a head's attention"),
      button("padding", "padding", "padding tokens"),
      button("punctuation", "punctuation", "punctuation and line breaks"),
      ...numbered.map((part) => button(part, `key ${part.replace("-", "–")}`, "the chosen tokens, as keys")),
    ),
  );
}

/** The chosen tokens as keys. */
export function asKeys(app: App, [first, last]: Range): Range {
  const by = app.state.axis === "query" ? app.layer.offset : 0;
  return [first + by, last + by];
}

/** What is hidden, in words: `without <s>, punctuation (3); rows sum to 1 again`. */
export async function words(app: App, place: Place): Promise<string> {
  const { hide } = place;
  if (!hide) return "";
  const [known, tokens] = await Promise.all([app.source.hidden(place), app.tokens(place, "key")]);
  const parts = hide.split(",").map((part) => {
    const found = ranges(part, known);
    const count = found.reduce((sum, [first, last]) => sum + last - first + 1, 0);
    if (part === "sinks") return known.sinks ? (count ? names(found, tokens) : "sinks (none)") : "sinks";
    return part === "padding" || part === "punctuation" ? `${part} (${count || "none"})` : names(found, tokens);
  });
  return `without ${parts.join(", ")}; rows sum to 1 again`;
}

/** What is hidden, in words that hold for every layer. */
export function plain(hide: string | undefined): string {
  return hide ? `without ${hide.replaceAll(",", ", ").replaceAll("-", "–")}; rows sum to 1 again` : "";
}

/** The first few tokens of some ranges. */
function names(ranges: Range[], tokens: Token[] | null): string {
  const all = ranges.flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, n) => first + n));
  const shown = all.slice(0, NAMED).map((n) => `${tokens?.[n] ? `${visible(tokens[n].text).slice(0, 24)} ` : ""}${n}`);
  return shown.join(", ") + (all.length > NAMED ? ` and ${all.length - NAMED} more` : "");
}

// Controls: segmented choices, menus, chips; each named, so that a rebuilt toolbar gives the focus back.

import { type Child, el } from "./element";
import { type Control, CONTROLS } from "./glossary";

/** A row of buttons of which one is pressed, behind its name; options are names by value. */
export function choice<T extends string>(
  label: Control,
  options: Partial<Record<T, string>>,
  current: T,
  choose: (value: T) => void,
): HTMLElement {
  const buttons = (Object.entries(options) as [T, string][]).map(([value, text]) => {
    const pressed = String(value === current);
    const about = { type: "button", "data-control": `${label}:${value}`, "aria-pressed": pressed };
    return el("button", { ...about, onclick: () => choose(value) }, text);
  });
  const group = el("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
  return el("div", { class: "labelled", title: CONTROLS[label] }, el("span", {}, label), group);
}

/** A button that is pressed or not, behind a name. */
export function toggle(label: string, text: string, about: string, pressed: boolean, act: () => void): HTMLElement {
  const button = { type: "button", "data-control": label, "aria-pressed": String(pressed), onclick: act };
  const group = el("div", { class: "choice", role: "group", "aria-label": label }, el("button", button, text));
  return el("div", { class: "labelled", title: about }, el("span", {}, label), group);
}

/** Options that are called what they are. */
export function named<T extends string>(values: readonly T[]): Partial<Record<T, string>> {
  const options: Partial<Record<T, string>> = {};
  for (const value of values) options[value] = value;
  return options;
}

/** Options by number. */
export function numbered(names: readonly string[]): Record<string, string> {
  return Object.fromEntries(names.entries());
}

/** A menu behind its name. */
export function menu<T extends string>(
  label: Control,
  options: Partial<Record<T, string>>,
  current: T,
  choose: (value: T) => void,
): HTMLElement {
  const entries = Object.entries(options) as [T, string][];
  const select = el(
    "select",
    { "aria-label": label, "data-control": label, onchange: () => choose(select.value as T) },
    ...entries.map(([value, text]) => el("option", { value, selected: value === current }, text)),
  );
  return el("label", { class: "menu", title: CONTROLS[label] }, el("span", {}, label), select);
}

/** A button that does something. */
export function button(label: string, act: () => void, ...children: Child[]): HTMLButtonElement {
  const shown = children.length ? children : [label];
  return el(
    "button",
    { type: "button", class: "plain", "aria-label": label, title: label, "data-control": label, onclick: act },
    ...shown,
  );
}

/** Rebuild a toolbar and leave the focus, and the caret, where they were. */
export function rebuild(bar: HTMLElement, ...children: Child[]): void {
  const active = document.activeElement;
  const name = bar.contains(active) ? active?.getAttribute("data-control") : null;
  const caret = active instanceof HTMLInputElement ? [active.selectionStart, active.selectionEnd] : null;
  bar.replaceChildren(...children.filter((child): child is Node => child instanceof Node));
  if (!name) return;
  const found = [...bar.querySelectorAll<HTMLElement>("[data-control]")].find((one) => one.dataset["control"] === name);
  found?.focus({ preventScroll: true });
  if (found instanceof HTMLInputElement && caret) found.setSelectionRange(caret[0], caret[1]);
}

/** A line that says what cannot be shown, and why. */
export function notice(text: string): HTMLElement {
  return el("p", { class: "notice", role: "status" }, text);
}

// Keyboard: what keys do, and the overlay that says so.

import { el } from "./element";

/** Keys that belong together, as the overlay shows them. */
interface Group {
  title: string;
  keys: [string, string][];
}

const HELP: Group[] = [
  {
    title: "everywhere",
    keys: [
      ["1…7", "overview, map, text, lines, flow, images, alignment"],
      ["[ ]", "previous, next head"],
      ["{ }", "previous, next layer"],
      ["m x", "mean, largest over heads"],
      ["s c", "next scale, next colours"],
      ["t", "dark or light"],
      ["/", "search; #120 is token 120"],
      ["n N", "next, previous match"],
      ["e", "export"],
      ["?", "this overlay"],
    ],
  },
  {
    title: "map",
    keys: [
      ["+ − 0", "zoom in, out, whole"],
      ["← ↑ ↓ →", "move"],
      ["drag wheel", "move, zoom"],
      ["click", "choose a query"],
      ["v", "compare on or off"],
    ],
  },
  {
    title: "text, flow, images",
    keys: [
      ["← → ↑ ↓", "another token or patch"],
      ["drag shift-click", "choose a span"],
      ["Enter", "follow the strongest link"],
    ],
  },
  {
    title: "overview, lines",
    keys: [
      ["← ↑ ↓ →", "another head; earlier, later tokens"],
      ["Enter", "open"],
      ["filter", "words of the name, sink>0.3, entropy<1, head>4"],
    ],
  },
];

/** Listen to keys, except where they are typed into a field. */
export function listen(act: (key: string) => boolean): void {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    if (event.target instanceof HTMLButtonElement && event.key === "Enter") return;
    if (act(event.key)) event.preventDefault();
  });
}

function typing(target: EventTarget | null): boolean {
  return (
    target instanceof HTMLInputElement ||
    target instanceof HTMLSelectElement ||
    (target instanceof Element && target.closest("dialog[open]") !== null)
  );
}

/** The overlay. */
export function help(): HTMLDialogElement {
  const groups = HELP.map(({ title, keys }) =>
    el(
      "section",
      {},
      el("h3", {}, title),
      el(
        "dl",
        {},
        ...keys.flatMap(([key, what]) => [
          el("dt", {}, ...key.split(" ").map((part) => el("kbd", {}, part))),
          el("dd", {}, what),
        ]),
      ),
    ),
  );
  const dialog = el(
    "dialog",
    { class: "help", "aria-label": "keys" },
    el("div", {}, el("h2", {}, "Keys"), el("div", { class: "columns" }, ...groups)),
  );
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "?") dialog.close();
  });
  return dialog;
}

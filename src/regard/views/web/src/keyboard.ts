// Keyboard: what keys do, and who listens to them.

/** Keys that belong together, as the help shows them. */
export interface Group {
  title: string;
  keys: [string, string][];
}

export const KEYS: Group[] = [
  {
    title: "everywhere",
    keys: [
      ["1…8", "overview, map, text, lines, flow, images, alignment, compare"],
      ["[ ]", "previous, next head"],
      ["{ }", "previous, next layer"],
      ["m x", "mean, largest over heads"],
      ["s c", "next scale, next colours"],
      ["t", "dark or light"],
      ["/", "search; #120 is token 120"],
      ["h H", "hide sinks and padding, the chosen tokens; rows sum to 1 again"],
      ["n N", "next, previous match"],
      ["e", "export"],
      ["?", "this help"],
    ],
  },
  {
    title: "map",
    keys: [
      ["+ − 0", "zoom in, out, whole"],
      ["← ↑ ↓ →", "go over the cells"],
      ["Enter", "zoom to the cell; choose its query"],
      ["i", "inspect the pair: its weight step by step"],
      ["shift ←", "move the map"],
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
    const key = event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key;
    if (act(key)) event.preventDefault();
  });
}

function typing(target: EventTarget | null): boolean {
  return (
    target instanceof HTMLInputElement ||
    target instanceof HTMLSelectElement ||
    (target instanceof Element && target.closest("dialog[open]") !== null)
  );
}

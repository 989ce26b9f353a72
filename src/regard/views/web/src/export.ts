// Export: the current view as PNG, SVG or CSV, handed to the browser as a download.

import { pixels, snapshot, source } from "./snapshot";

export type Kind = "png" | "svg" | "csv";

export async function save(
  kind: Kind,
  name: string,
  stage: HTMLElement,
  table: () => string[][] | Promise<string[][]>,
): Promise<void> {
  const blob =
    kind === "csv"
      ? new Blob([csv(await table())], { type: "text/csv;charset=utf-8" })
      : kind === "svg"
        ? new Blob([source(snapshot(stage))], { type: "image/svg+xml" })
        : await pixels(snapshot(stage));
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  [link.href, link.download] = [address, `${name.replace(/[^\p{L}\p{N}.-]+/gu, "-")}.${kind}`];
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Rows as RFC 4180 has them. A text that a spreadsheet would run as a formula is set behind an apostrophe. */
export function csv(rows: string[][]): string {
  const field = (text: string): string => {
    const safe = /^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

// The viewer begins: numbers come from the page where it holds them, else from its server.

import { App, words } from "./app";
import { notice } from "./controls";
import { Inline } from "./inline";
import { Remote } from "./remote";
import { Shell } from "./shell";

async function begin(): Promise<void> {
  const held = document.getElementById("regard-data");
  const source = held
    ? new Inline((JSON.parse(held.textContent ?? "") as { resources: Record<string, string> }).resources)
    : new Remote();
  const session = await source.session();
  new Shell(new App(source, session));
}

begin().catch((error: unknown) => document.body.replaceChildren(notice(words(error) ?? "")));

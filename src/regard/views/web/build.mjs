// Builds dist/ from src/: one classic script, one style sheet, one page, and the licenses of what is bundled.
// Two builds give the same bytes.
import { createHash } from "node:crypto";
import { copyFile, mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { build } from "esbuild";

// Parts of OpenSeadragon that the viewer has no use for: other tile formats, other drawers, buttons.
const UNUSED = `Navigator DziTileSource IIIFTileSource OsmTileSource TmsTileSource LegacyTileSource ImageTileSource
  TileSourceCollection Button ButtonGroup ReferenceStrip HTMLDrawer WebGLDrawer`.split(/\s+/);

const slim = {
  name: "slim",
  setup({ onLoad }) {
    onLoad({ filter: /openseadragon\.js$/ }, async ({ path }) => {
      const parts = (await readFile(path, "utf8")).split(/(?=^\/\*\n \* OpenSeadragon - )/m);
      const name = (part) => /^\/\*\n \* OpenSeadragon - (.+)$/m.exec(part)?.[1];
      const missing = UNUSED.filter((unused) => !parts.some((part) => name(part) === unused));
      if (missing.length) throw new Error(`OpenSeadragon has no ${missing.join(", ")}`);
      return { contents: parts.filter((part) => !UNUSED.includes(name(part))).join(""), loader: "js" };
    });
  },
};

const options = { minify: true, charset: "ascii", target: "es2022", outdir: "dist", logLevel: "warning" };
await mkdir("dist", { recursive: true });
const { metafile } = await build({
  ...options,
  entryPoints: { app: "src/main.ts" },
  bundle: true,
  format: "iife",
  legalComments: "none",
  metafile: true,
  plugins: [slim],
});
await build({ ...options, entryPoints: { app: "src/app.css" } });
await copyFile("src/index.html", "dist/index.html");

const bundled = Object.keys(metafile.inputs).flatMap((path) => /^node_modules\/([^/]+)/.exec(path)?.[1] ?? []);
const notices = [...new Set(bundled)].sort().map(async (name) => {
  const { version } = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
  const file = (await readdir(`node_modules/${name}`)).find((entry) => /^licen[cs]e/i.test(entry));
  return `${name} ${version}\n\n${(await readFile(`node_modules/${name}/${file}`, "utf8")).trim()}\n`;
});
await writeFile("dist/licenses.txt", `app.js holds parts of:\n\n${(await Promise.all(notices)).join("\n\n")}`);

// What the bundle was made of, so that a test can tell a bundle that was forgotten.
const sources = [...(await readdir("src")).map((name) => `src/${name}`), "build.mjs", "package-lock.json"].sort();
const digest = createHash("sha256");
for (const path of sources) digest.update(await readFile(path));
await writeFile("dist/sources.sha256", `${digest.digest("hex")}\n`);

// The stack of layers a token flows through.

import type { Layer } from "./source";

/** Whether a layer of self-attention is over the same tokens as the one at the top of its stack. */
export function follows(layer: Layer, top: Layer, batch: number): boolean {
  const text = (one: Layer): number | null | undefined => one.texts[Math.min(batch, one.texts.length - 1)]?.[1];
  return (
    layer.kind === "weights" &&
    layer.self &&
    layer.n_i === top.n_i &&
    layer.n_j === top.n_i &&
    batch < layer.batch &&
    text(layer) === text(top)
  );
}

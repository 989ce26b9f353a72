// Glossary: what controls do, what views show and what terms mean, in plain words.

import type { ViewName } from "./state";

/** Each control that has a caption, and what it does. */
export const CONTROLS = {
  capture: "The capture on screen, of the two that are open.",
  text: "The text of the batch, by its number and its first words.",
  layer: "The layer on screen.",
  head: "The head on screen; mean and max are taken over all heads of the layer, weight by weight.",
  compare: "Show the map beside another one: the other capture's, or another head's.",
  "rank by": "How the heads of two captures are compared: the mean difference of their weights, or a divergence of their rows.",
  layout: "Both maps and their difference, or the difference alone.",
  scale: "How weights become colours: sqrt and log show small weights that linear hides.",
  colours: "The colours of weights.",
  cells: "While zoomed out a cell holds many weights: show their mean, or the largest of them.",
  show: "Weights, or value-weighted: the norm of what each key adds to the output of a query, its weight times its value.",
  range: "auto ends the colours at the strong weights on screen; 0–1 is the same for every map.",
  draw: "The lines of one layer, or small pictures of all layers.",
  tokens: "How many tokens a side are drawn.",
  "from sentence": "Draw the lines of the queries of one sentence alone.",
  "to sentence": "Draw the lines to the keys of one sentence alone.",
  links: "All weights, the strongest source word of each target word, or words that choose each other.",
  "choose by": "What a click on the text chooses.",
  "colour by": "Colour the words that the chosen token looks at, or those that look at it.",
  "from layer": "Follow the token down from the output of this layer.",
  hide: "Hidden keys get no weight, and the rest of each row sums to 1 again (key h).",
  predictions: "Mark each word by how probable the language model found it, from the words before.",
  sort: "The order of the heads: by layer, by what they do, by which attend alike, or by a number.",
} as const;
export type Control = keyof typeof CONTROLS;

/** Each view in two sentences. */
export const SENTENCES: Record<ViewName, string> = {
  overview:
    "A small map for each head, a row for each layer. Sort and filter heads by their measures, roles and likeness, and click one to open its map.",
  map: "The weights of one head: a row for each query, a column for each key. Scroll to zoom until each cell is one weight.",
  text: "The text, coloured by what a chosen token looks at, or by which tokens look at it. Click a token, or drag over several.",
  lines:
    "Tokens on the left joined to the tokens they look at on the right, in one colour for each head. Hover over a token for its lines, a stripe for each head and the weights, or over a line for its weight.",
  flow: "How much of a token comes from which other token after all layers together. Choose the token with a click on the picture or the list.",
  images:
    "The patches of a picture, coloured by how much a token looks at them. Choose another token or patch with a click.",
  compare:
    "The heads of two captures, those first that differ most over the words both texts have. Click one to open both maps.",
  alignment: "The words of one text joined to those of another. Beside them is the table of their weights.",
};

export const TERMS: [term: string, meaning: string][] = [
  ["query, key", "The token that looks, and the token that is looked at. The weights of a query sum to 1."],
  ["entropy", "How widely a query spreads its weights: 0 if all is on one key, large if many keys have the same."],
  ["distance", "How far a query looks, in tokens, as the mean over its weights."],
  ["attention sink", "A key that most queries rest on though it says little, often the first token."],
  ["sqrt scale", "Colours follow the square root of the weight, so that a weight of 0.01 is a tenth as strong as 1."],
  ["rollout", "The layers' maps multiplied together, each the mean of its heads and half of it the token itself."],
  ["role", "What a head does, by a score above a threshold: look at the previous token, copy, rest on a sink, follow positions."],
  ["A − B", "The weights of one map less those of another: red where A has more, blue where B has more."],
];

// Atlas: the roles of heads and the heads that attend alike, read layer by layer, with their marks and legend.

import type { App } from "./app";
import { el } from "./element";
import { brief } from "./legend";
import { type Clusters, Refusal, type Role, type Roles, ROLES } from "./source";

/** Weights of a capture up to which roles are looked for without being asked. */
const AT_ONCE = 2 ** 26;

/** Each role: two letters for its mark, its name, and its score in words. */
export const NAMES: Record<Role, [letters: string, name: string, score: string]> = {
  previous_token: ["pr", "previous token", "mean weight on the token before"],
  induction: ["in", "induction", "mean weight on tokens that followed the same token earlier"],
  duplicate_token: ["du", "duplicate token", "mean weight on earlier tokens that are the same"],
  retrieval: ["re", "retrieval", "mean weight on an earlier token that is the next one"],
  sink: ["si", "sink", "share of attention that rests on keys which draw more than the threshold"],
  positional: ["po", "positional", "1 if each row is the row before, moved by one token"],
};

export class Atlas {
  readonly roles = new Map<number, Roles>();
  clusters: Clusters | null = null;
  /** Why roles, or clusters, are not there. */
  missing = "";
  private asked = "";

  constructor(
    private readonly app: App,
    /** Told of each answer. */
    private readonly changed: (layer: number | null) => void,
  ) {}

  /** Whether roles are looked for without being asked. */
  get isQuick(): boolean {
    const { layers } = this.app.capture;
    const weights = layers.reduce((sum, { batch, heads, n_i, n_j }) => sum + batch * heads.length * n_i * n_j, 0);
    return !this.app.session.live || weights <= AT_ONCE;
  }

  /** Forget what is known, for another capture. */
  clear(): void {
    this.roles.clear();
    this.clusters = null;
    [this.asked, this.missing] = ["", ""];
  }

  /** Read the roles of layers, one after the other; once. */
  async read(layers: readonly number[]): Promise<void> {
    const { capture } = this.app.state;
    const key = `${capture}`;
    if (this.asked === key) return;
    this.asked = key;
    for (const layer of layers) {
      if (this.app.capture.layers[layer].kind === "measures") continue;
      try {
        const found = await this.app.source.roles(capture, layer);
        if (this.asked !== key) return;
        this.roles.set(layer, found);
      } catch (error) {
        if (!(error instanceof Refusal)) throw error;
        if (this.asked !== key) return;
        this.missing = error.message;
      }
      this.changed(layer);
    }
  }

  /** Read the clusters of the capture; once. */
  async readClusters(): Promise<void> {
    const { capture } = this.app.state;
    if (this.clusters) return;
    try {
      const found = await this.app.source.clusters(capture);
      if (capture !== this.app.state.capture) return;
      this.clusters = found;
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.missing = error.message;
    }
    this.changed(null);
  }

  of(layer: number, head: number): Role[] {
    return this.roles.get(layer)?.roles[head] ?? [];
  }

  score(layer: number, head: number, role: Role): number {
    return this.roles.get(layer)?.scores[head]?.[role] ?? NaN;
  }

  /** The role a head is filed under: the first of those it has. */
  first(layer: number, head: number): Role | "none" {
    return this.of(layer, head)[0] ?? "none";
  }

  /** The legend of roles, each a button that shows its heads alone. */
  legend(choose: (role: "" | "none" | Role) => void): HTMLElement | null {
    if (!this.roles.size) return null;
    const { role: chosen } = this.app.state;
    const counts = new Map<Role | "none", number>();
    for (const { roles } of this.roles.values()) {
      for (const own of roles) {
        for (const role of own.length ? own : (["none"] as const)) counts.set(role, (counts.get(role) ?? 0) + 1);
      }
    }
    const [{ thresholds }] = this.roles.values();
    const button = (role: Role | "none"): HTMLElement => {
      const [, name, score] = role === "none" ? ["", "no role", "heads whose scores are all below their thresholds"] : NAMES[role];
      const about = role === "none" ? score : `score: ${score}; a head has the role above ${thresholds[role]}`;
      const pressed = chosen === role;
      return el(
        "button",
        {
          type: "button",
          class: "role",
          "data-control": `role:${role}`,
          "aria-pressed": String(pressed),
          title: about,
          onclick: () => choose(pressed ? "" : role),
        },
        role === "none" ? null : badge(role),
        `${name} `,
        el("span", { class: "faint" }, counts.get(role) ?? 0),
      );
    };
    const shown = [...ROLES, "none" as const].filter((role) => counts.get(role) || chosen === role);
    return el("div", { class: "roles", role: "group", "aria-label": "heads by role" }, ...shown.map(button));
  }

  /** What roles are of, and what is not known of them. */
  remarks(): string[] {
    if (!this.roles.size) return this.missing ? [`no roles: ${this.missing.replace(/\.$/, "")}`] : [];
    const notes = new Set([...this.roles.values()].flatMap(({ notes }) => notes));
    const texts = this.app.capture.batch > 1 ? `all ${this.app.capture.batch} texts` : "the text";
    const hidden = this.app.state.hide ? ", with the keys that are hidden" : "";
    return [`roles are of all weights over ${texts}${hidden}`, ...notes];
  }

  /** How similar heads of a cluster are, and of what. */
  similarity(): string {
    if (!this.clusters) return "";
    const { similarity, state, of, cell } = this.clusters;
    const cells = cell[0] * cell[1] > 1 ? `means of ${cell[0]} × ${cell[1]} weights` : "the weights";
    const what = state === "exact" ? "all weights" : state === "sampled" && of ? `${cells} of ${of[0]} of ${of[1]} queries` : cells;
    return `heads are together while the mean cosine similarity of ${what} is at least ${similarity}; neighbours are alike`;
  }
}

/** The mark of a role. */
export function badge(role: Role): HTMLElement {
  return el("i", { class: "badge-role", "data-role": role, title: NAMES[role][1] }, NAMES[role][0]);
}

/** A score in words. */
export function scored(role: Role, value: number): string {
  return `${NAMES[role][1]} ${brief(value)}`;
}

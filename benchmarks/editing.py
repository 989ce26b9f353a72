"""What edits cost, and what a knockout sweep takes beside TransformerLens and nnsight.

`python -m benchmarks.editing cost` times edited attention beside the plain fused one, in turn, with each kind of edit:
on a GPU the pass of a Llama-shaped model of transformers with random weights in bfloat16, edited in every layer, on a
CPU one causal attention of 16 heads, 4 key heads and a width of 64 in float32, CPU time of one thread. First one
attention is compared with a matrix of scores that is changed entry by entry in float64: an edited output may be off by
at most twice what that matrix in its dtype is off by.

`python -m benchmarks.editing sweep --tokens 8192 65536` times a knockout sweep of a model of SmolLM2-135M's shape with
random weights: in each head, the last token does not see four tokens. The table has whole passes beside it, one for
each set of edits, which is what a loop takes. With `--layers` it has some layers alone.

`python -m benchmarks.editing peers --folder FOLDER --python PYTHON` runs the sweep by TransformerLens, nnsight and
regard on the model that transformers saved in a folder, each in a process of its own: of every head on a GPU, of six
heads on one CPU thread; `--layers` names the layers. Without a folder, the model is of SmolLM2-135M's shape with random
weights. PYTHON is that of an environment with transformer-lens and nnsight; `--tools` names those to run. All must find
the same values.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lens import Boost, Cut, Freeze, From, Only, Scale, Temperature, capture, edit, knockouts, sweep

from . import lens
from .__main__ import COMMIT, RESULTS, machine, milliseconds, spread, update
from .measure import Measured, save

TILES, OTHERS = 1.1, 1.3  # at most so many times the plain pass: edits that are masks of tiles, all others
TOKENS = {"cuda": 16_384, "cpu": 4_096}  # of `cost`
TOOLS = ("transformer-lens", "nnsight")
SECONDS = 1.0  # of repeats of each edit
HALF_ERROR = 0.03  # by which logits in bfloat16 may differ between tools
FIELDS = [
    *("case", "tokens", "time", "quartiles", "ratio", "bar", "met", "peak_memory", "repeats", "machine"),
    *("python", "torch", "transformers", "commit", "date"),
]
SWEEP_FIELDS = [
    *("case", "tokens", "tool", "time", "per_set", "ratio", "peak_memory", "weights", "threads", "machine"),
    *("python", "torch", "transformers", "commit", "date"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "sweep", "peers"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="other numbers are not saved by cost")
    parser.add_argument("--only", default="", help="measure only edits whose source holds this (cost)")
    parser.add_argument("--layers", type=int, nargs="+", help="these layers alone (sweep, peers)")
    parser.add_argument("--folder", type=Path, help="a model that transformers saved (peers)")
    parser.add_argument("--python", default=sys.executable, help="with transformer-lens and nnsight (peers)")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS, help="beside regard (peers)")
    chosen = parser.parse_args(arguments)
    with torch.no_grad():
        {"cost": measure_cost, "sweep": measure_sweep, "peers": measure_peers}[chosen.what](chosen)


def cases(n: int) -> list[tuple[Any, float]]:
    """Edits of a text of n tokens, each with its bar."""
    word, later = slice(n // 8, n // 8 + 4), slice(n // 2, None)
    return [
        (Cut(keys=word), TILES),
        (Cut(keys=slice(n // 8, n // 4)), TILES),
        (Cut(queries=later, keys=slice(n // 8, n // 4)), TILES),
        (Cut(queries=-1, keys=word), TILES),
        (Cut(keys=word, heads=3), TILES),
        (Cut(queries=later, keys=word, heads=[3, 5]), TILES),
        (Boost(word, 2.0), OTHERS),
        (Boost(word, -2.0), OTHERS),
        (Boost(word, 2.0, queries=-1), OTHERS),
        (Boost(word, 2.0, heads=3), OTHERS),
        (Boost(slice(n // 8, n // 4), 2.0, queries=later), OTHERS),
        (Temperature(None, 0.5), OTHERS),
        (Temperature([0, 3], 0.5), OTHERS),
        (Scale(3, 0), OTHERS),
        (Only([0, 1, 2]), OTHERS),
        (Freeze(), OTHERS),
    ]


def measure_cost(chosen: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # many CPUs have no products in bfloat16
    (n,) = chosen.tokens or [TOKENS[device.type]]
    for each, off, plain in errors(min(n, 1024), device, dtype):
        if chosen.only in repr(each) and not off <= 2 * plain + torch.finfo(dtype).eps:
            raise SystemExit(f"error: {each!r} is off by {off:.3g}, plain {plain:.3g}; nothing was measured")
    model, run = (pass_of_llama if device.type == "cuda" else one_attention)(n, device, dtype)

    def edited(each: Any) -> Any:
        with edit(model, {"*": each}):
            return run()

    with capture(model) as tape:
        run()
    found = [*cases(n), (From(tape), OTHERS), (From(tape, heads=3), OTHERS)]
    for each, bar in found:
        if chosen.only in repr(each):
            row = measured(repr(each), run, lambda each=each: edited(each), n, bar, device)
            print(
                f"{row['case']:<64}{row['time']:>12}  x {row['ratio']:<6}(bar {bar}) {row['peak_memory']}", flush=True
            )
            if n == TOKENS[device.type]:
                update(row, RESULTS / f"editing_{device.type}.csv", FIELDS, [repr(one) for one, _ in found])


def pass_of_llama(n: int, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], Any]]:
    model = lens.llama(lens.HIDDEN, n).to(device, dtype).eval()
    ids = torch.randint(0, lens.VOCABULARY, (1, n), device=device)
    return model, lambda: model(ids, use_cache=False, logits_to_keep=1)


def one_attention(n: int, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], Any]]:
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, h, n, 64, device=device, dtype=dtype) for h in (16, 4, 4))
    model = nn.ModuleDict({"self_attn": OneAttention()})
    return model, lambda: model["self_attn"](q, k, v)


def measured(
    name: str, plain: Callable[[], Any], edited: Callable[[], Any], n: int, bar: float, device: torch.device
) -> dict[str, object]:
    edited()
    plain()
    slowest = max(seconds(edited, device), seconds(plain, device))
    repeats = max(3, min(30, int(SECONDS / 2 / slowest)))
    taken: list[tuple[float, float]] = [(seconds(edited, device), seconds(plain, device)) for _ in range(repeats)]
    ours, peer = (Measured.of(list(each)) for each in zip(*taken, strict=True))
    ratio = ours.median / peer.median
    return {
        "case": name,
        "tokens": n,
        "time": milliseconds(ours.median),
        "quartiles": spread(ours, milliseconds),
        "ratio": f"{ratio:.2f}",
        "bar": bar,
        "met": "yes" if ratio <= bar else "no",
        "peak_memory": f"{peak(edited, device) / 1e6:.0f} MB" if device.type == "cuda" else "",
        "repeats": repeats,
        **provenance(device),
    }


def provenance(device: torch.device) -> dict[str, object]:
    return {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


def measure_sweep(chosen: argparse.Namespace) -> None:
    """Time a sweep of every head and print a row for each number of tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = smollm2(max(chosen.tokens)).to(device, dtype).eval()
    layers = range(model.config.num_hidden_layers) if chosen.layers is None else chosen.layers
    heads = {f"model.layers.{layer}.self_attn": model.config.num_attention_heads for layer in layers}
    for n in chosen.tokens:
        ids = torch.randint(0, model.config.vocab_size, (1, n), device=device)
        inputs = {"input_ids": ids, "logits_to_keep": 1}
        sets = knockouts(heads, keys={"word": slice(n // 8, n // 8 + 4)}, queries=-1)
        few = dict(itertools.islice(sets.items(), 1))

        def run(sets: Any = sets, inputs: Any = inputs) -> Any:
            return sweep(model, inputs, sets, lambda out: out.logits[0, -1, 0])

        run(few)
        passes = [seconds(lambda inputs=inputs: model(**inputs, use_cache=False), device) for _ in range(5)]
        plain = statistics.median(passes)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        taken = seconds(run, device)
        memory = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        row = {
            "case": f"{len(sets)} knockouts in {len(heads)} layers",
            "tokens": n,
            "tool": "regard",
            "time": f"{taken:.2f} s",
            "per_set": milliseconds(taken / len(sets)),
            "ratio": f"{plain * len(sets) / taken:.2f}",
            "peak_memory": f"{memory / 1e6:.0f} MB",
            "weights": "random, of SmolLM2-135M's shape",
            "threads": "" if device.type == "cuda" else torch.get_num_threads(),
            **provenance(device),
        }
        report_sweep(row)
        save_sweep(row)


def smollm2(longest: int) -> Any:
    """A model of SmolLM2-135M's shape with random weights, on PyTorch's fused attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def measure_peers(chosen: argparse.Namespace) -> None:
    """Run the sweep by each tool in a process of its own, and print a row for each."""
    if chosen.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(folder, max(chosen.tokens))
            run_peers(chosen, Path(folder), "random, of SmolLM2-135M's shape")
    else:
        run_peers(chosen, chosen.folder, "SmolLM2-135M-Instruct")


def run_peers(chosen: argparse.Namespace, folder: Path, weights: str) -> None:
    script = Path(__file__).with_name("editing_peer.py")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    layers = chosen.layers or (range(30) if on_gpu else (0, 15, 29))
    for n in chosen.tokens:
        found = {}
        for tool in ("regard", *chosen.tools):
            python = sys.executable if tool == "regard" else chosen.python
            command = [python, "-W", "ignore", str(script), tool, str(folder), str(n), ",".join(map(str, layers))]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if run.returncode:
                raise SystemExit(f"error: {tool} failed:\n{run.stderr[-2000:]}")
            found[tool] = json.loads(run.stdout.splitlines()[-1])
        for tool, each in found.items():
            values, ours = (torch.tensor(one["values"]) for one in (each, found["regard"]))
            if not torch.allclose(values, ours, atol=HALF_ERROR if on_gpu else 1e-3, rtol=1e-3):
                raise SystemExit(f"error: {tool} finds {values.tolist()}, regard {ours.tolist()}; nothing was saved")
            row = {
                "case": f"{len(values)} knockouts in {len(layers)} layers",
                "tokens": n,
                "tool": f"{tool} {each['version']}",
                "time": f"{each['seconds']:.2f} s",
                "per_set": milliseconds(each["seconds"] / len(values)),
                "ratio": f"{each['seconds'] / found['regard']['seconds']:.2f}",
                "peak_memory": f"{each['bytes'] / 1e6:.0f} MB",
                "weights": weights,
                "threads": "" if on_gpu else 1,
                **provenance(device),
            }
            report_sweep(row)
            save_sweep(row)


def save_random_model(folder: str, longest: int) -> None:
    """Save a model and a tokenizer, as the tools load them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    smollm2(longest).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1}, unk_token="<unk>"))
    special = {"bos_token": "<s>", "eos_token": "<s>", "pad_token": "<s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def report_sweep(row: dict[str, object]) -> None:
    shown = ("case", "tokens", "tool", "time", "per_set", "ratio", "peak_memory")
    print("  ".join(f"{row[name]!s:>12}" for name in shown), flush=True)


def save_sweep(row: dict[str, object]) -> None:
    """Replace the row of this case, number of tokens, tool and machine."""
    path, key = RESULTS / "editing_sweeps.csv", ("case", "tokens", "tool", "machine")
    rows = list(csv.DictReader(path.open(encoding="utf8"))) if path.exists() else []
    rows = [one for one in rows if any(one[name] != str(row[name]) for name in key)]
    save([*rows, row], path, SWEEP_FIELDS)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" or torch.get_num_threads() > 1 else time.thread_time
    wait(device)
    start = clock()
    call()
    wait(device)
    return clock() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak(call: Callable[[], Any], device: torch.device) -> float:
    """Bytes allocated at most during a call, beyond what was allocated before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    wait(device)
    return torch.cuda.max_memory_allocated() - before


class OneAttention(nn.Module):
    """Causal attention of four query heads to a key head, by PyTorch's kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def errors(n: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, float, float]]:
    """Yield each edit with the error of one attention under it, and that of its whole matrix in the same dtype."""
    torch.manual_seed(0)
    q = torch.randn(1, 8, n, 64, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, 2, n, 64, device=device, dtype=dtype)
    model = nn.ModuleDict({"self_attn": OneAttention()})["self_attn"]
    exact = [x.double() for x in (q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))]
    halves = [x.to(dtype) for x in exact]
    for each, _ in cases(n):
        with edit(model, {"*": each}):
            out = model(q, k, v)
        want = dense(*exact, each)
        yield each, *((x.double() - want).abs().max().item() for x in (out, dense(*halves, each)))


def dense(q: Tensor, k: Tensor, v: Tensor, each: Any) -> Tensor:
    """Edited causal attention by its whole matrix; b h i d, b h j d, b h j e -> b h i e."""
    h, n = q.shape[1], q.shape[2]
    s = q @ k.mT * q.shape[-1] ** -0.5
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    of_edit = torch.zeros(h, n, n, dtype=torch.bool, device=q.device)
    chosen = range(h) if getattr(each, "heads", None) is None else each.heads
    if isinstance(each, (Cut, Boost)):
        rows, cols = (slice(None) if x is None else [x] if isinstance(x, int) else x for x in (each.queries, each.keys))
        for head in chosen:
            part = torch.zeros(n, n, dtype=torch.bool, device=q.device)
            part[rows, cols] = True
            of_edit[head] = part
    if isinstance(each, Boost):
        s = s + each.amount * of_edit.to(s.dtype)
    if isinstance(each, Temperature):
        s = torch.cat([s[:, [x]] / (each.factor if x in chosen else 1) for x in range(h)], 1)
    keep = causal & ~of_edit if isinstance(each, Cut) else causal
    out = s.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0) @ v
    factors = each.factors(h) if isinstance(each, (Scale, Only)) else [1.0] * h
    return out * out.new_tensor(factors)[:, None, None]


if __name__ == "__main__":
    main()

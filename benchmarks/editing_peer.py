"""`python editing_peer.py TOOL FOLDER TOKENS LAYERS`: a knockout sweep by TransformerLens, nnsight or regard, as JSON.

`python -m benchmarks.editing peers` runs it once for each tool, with a Python that has the tool installed; nothing of
this repository is imported for the others. FOLDER holds a Llama-shaped model that transformers saved. In each set of
edits, the last token does not see four tokens, in one head of one of LAYERS, as "0,15,29". A GPU runs every head, in
bfloat16, one thread of a CPU the first and the last head, in float32.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


Sets = list[tuple[int, int]]  # layer and head


def by_regard(folder: str, ids: Any, keys: slice) -> Callable[[Sets], list[float]]:
    from transformers import AutoModelForCausalLM

    from regard.lens import Cut, sweep

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE).eval()
    model(ids[:, :8])  # the weights are read from the file
    inputs = {"input_ids": ids, "logits_to_keep": 1}

    def run(sets: Sets) -> list[float]:
        edits = {
            (layer, head): {f"model.layers.{layer}.self_attn": Cut(queries=-1, keys=keys, heads=head)}
            for layer, head in sets
        }
        values: list[float] = sweep(model, inputs, edits, lambda out: out.logits[0, -1, 0]).values.tolist()
        return values

    return run


def by_transformer_lens(folder: str, ids: Any, keys: slice) -> Callable[[Sets], list[float]]:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, attn_implementation="eager").to(DEVICE).eval()
    model(ids[:, :8])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device=DEVICE)

    def run(sets: Sets) -> list[float]:
        found = []
        for layer, head in sets:

            def cut(scores: Any, hook: Any, head: int = head) -> Any:
                scores[:, head, -1, keys] = -torch.inf
                return scores

            name = f"blocks.{layer}.attn.hook_attn_scores"
            logits = bridge.run_with_hooks(ids, fwd_hooks=[(name, cut)], return_type="logits")
            found.append(float(logits[0, -1, 0]))
        return found

    return run


def by_nnsight(folder: str, ids: Any, keys: slice) -> Callable[[Sets], list[float]]:
    from nnsight import LanguageModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, attn_implementation="eager").to(DEVICE).eval()
    own(ids[:, :8])
    model = LanguageModel(own, tokenizer=AutoTokenizer.from_pretrained(folder))

    def run(sets: Sets) -> list[float]:
        found = []
        for layer, head in sets:
            with model.trace(ids, logits_to_keep=1):
                attention = model.model.layers[layer].self_attn.source.attention_interface_1
                attention.source.nn_functional_softmax_0.inputs[0][0][:, head, -1, keys] = -torch.inf
                logits = model.output.logits[0, -1, 0].save()
            found.append(float(logits))
        return found

    return run


TOOLS = {"regard": by_regard, "transformer-lens": by_transformer_lens, "nnsight": by_nnsight}


def main() -> None:
    tool, folder, tokens, chosen = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    ids = torch.randint(0, 49_152, (1, tokens), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf8"))
    heads = range(config["num_attention_heads"])
    sets = [
        (int(layer), head)
        for layer in chosen.split(",")
        for head in (heads if DEVICE == "cuda" else heads[:: len(heads) - 1])
    ]
    with torch.no_grad():
        run = TOOLS[tool](folder, ids, slice(tokens // 8, tokens // 8 + 4))
        values, seconds, size = (measured_on_gpu if DEVICE == "cuda" else measured_on_cpu)(run, sets)
    found = {"values": values, "seconds": seconds, "bytes": size, "version": version_of(tool)}
    print(json.dumps(found))


def version_of(tool: str) -> str:
    """Return the version of a tool; regard runs from a checkout too, where it is not installed."""
    if tool != "regard":
        return version(tool)
    from regard import __version__

    return __version__


def measured_on_gpu(run: Callable[[Sets], list[float]], sets: Sets) -> tuple[list[float], float, int]:
    """Return the values, the seconds and the bytes allocated at most beside the weights."""
    run(sets[:1])  # kernels are loaded the first time
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    values = run(sets)
    torch.cuda.synchronize()
    return values, time.perf_counter() - start, torch.cuda.max_memory_allocated() - before


def measured_on_cpu(run: Callable[[Sets], list[float]], sets: Sets) -> tuple[list[float], float, int]:
    """Return the values, the seconds of the thread and the bytes by which the resident set grew at most."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf8")  # Linux then forgets the largest size
    before, start = memory("VmRSS"), time.thread_time()
    values = run(sets)
    return values, time.thread_time() - start, memory("VmHWM") - before


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()

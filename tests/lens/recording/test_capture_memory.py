"""What a capture costs in memory: queries and keys, and nothing of the size of the matrix."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from regard import Causal
from regard.lens import capture
from regard.nn import Attention

DIM, HEADS, DEPTH = 64, 2, 4

# Peak memory is of a process, so each way to run the model has one of its own.
PROGRAM = """
import json, resource, sys, torch
sys.path.insert(0, {root!r})
from tests.lens.recording.test_capture_memory import model_of
from regard.lens import capture
torch.set_num_threads(2)
how, n = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model, x = model_of(), torch.randn(1, n, 64)
with torch.inference_mode():
    if how == "plain":
        model(x)
    else:
        with capture(model) as tape:
            model(x)
        for A in tape.values():
            A.summary()
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
"""


def model_of():
    return nn.Sequential(*(Attention(DIM, HEADS, mask=Causal()) for _ in range(DEPTH))).eval()


def peak(how, n):
    program = PROGRAM.format(root=str(Path(__file__).parents[3]))
    run = subprocess.run([sys.executable, "-c", program, how, str(n)], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.slow
def test_capture_of_32768_tokens_takes_at_most_a_fifth_more_memory():
    n = 32_768
    queries_and_keys = 2 * DEPTH * n * DIM * 4
    assert peak("watched", n) <= 1.2 * (peak("plain", n) + queries_and_keys)


def test_a_tape_holds_queries_and_keys_only():
    model, x = model_of(), torch.randn(1, 1_000, DIM)
    with torch.no_grad(), capture(model) as tape:
        model(x)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for A in tape.values() for t in A._call.tensors()
    }
    assert sum(held.values()) == 2 * DEPTH * 1_000 * DIM * 4


def test_views_of_a_joint_projection_do_not_keep_it_alive():
    class Joint(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(DIM, 3 * DIM)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    model = Joint()
    with torch.no_grad(), capture(model) as tape:
        model(torch.randn(1, 50, DIM))
    assert sum(x.untyped_storage().nbytes() for x in tape[0]._call.tensors()) == 2 * 50 * DIM * 4


def test_generation_holds_each_key_once():
    model, x = Attention(DIM, HEADS, mask=Causal()).eval(), torch.randn(1, 40, DIM)
    with torch.no_grad(), capture(model, budget=f"{2 * 40 * DIM * 4}B") as tape:
        cache = model.new_cache()
        for part in x.split(1, 1):
            model(part, cache=cache)
    assert tape[0].shape == (1, HEADS, 40, 40)

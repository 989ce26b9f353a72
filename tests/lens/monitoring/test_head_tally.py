"""The tally of heads: sums over rows that join calls, and processes, to the numbers of the whole batch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard import Causal, Padding, weights
from regard.lens import HeadHistory, Monitor, qk_clip_
from regard.lens.monitoring.head_tally import MEASURES, HeadTally
from regard.lens.real_tokens import real_tokens
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from tests.lens.monitoring import monitored_processes
from tests.lens.monitoring.watched_model import Watched, batches

ROOT = Path(__file__).parents[3]


def entry(A, names=("logit", "entropy", "max", "distance", "received")):
    measured = A.measures(queries=real_tokens(A).counted)
    return Reduced(A.shape, {name: TensorInMemory(measured[name]) for name in names}, real_tokens(A))


def test_texts_in_calls_of_their_own_have_the_numbers_of_one_batch():
    q, k = torch.randn(2, 3, 2, 6, 8)
    lengths = (6, 2, 4)
    whole, parts = HeadTally(), HeadTally()
    A = weights(q, k, mask=Causal() & Padding(lengths))
    whole.add([("a", entry(A))])
    calls = []
    for n, length in enumerate(lengths):
        B = weights(q[n : n + 1, :, :length], k[n : n + 1, :, :length], mask=Causal())
        calls.append(("a", entry(B)))
        parts.add(calls)  # the calls before are not computed again: their measures are released
    found, expected = parts.values(MEASURES)["a"], whole.values(MEASURES)["a"]
    assert list(found) == list(MEASURES)
    torch.testing.assert_close(found, expected)


def test_a_measure_that_was_not_kept_is_nan():
    A = weights(*torch.randn(2, 1, 2, 6, 8))
    tally = HeadTally()
    tally.add([("a", entry(A, ("entropy",)))])
    found = tally.values(MEASURES)["a"]
    torch.testing.assert_close(found["entropy"], A.entropy().mean(-1)[0])
    assert all(found[name].isnan().all() for name in MEASURES if name != "entropy")
    assert HeadTally().values(MEASURES) == {}


@pytest.mark.processes
def test_two_processes_have_the_history_of_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = ["--module", monitored_processes.__name__, str(tmp_path)]
    run = subprocess.run([*command, *module], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    model = Watched()
    optimizer, monitor = torch.optim.SGD(model.parameters(), 0.1), Monitor(model, every=1, say=lambda line: None)
    for n in range(monitored_processes.STEPS):
        with monitor:
            for tokens in batches()[2 * n : 2 * n + 2]:
                (model(tokens).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert qk_clip_(model, monitor, monitored_processes.CLIP)
    with monitor:
        model(batches()[2 * monitored_processes.STEPS])
    for kind in ("ddp", "fsdp"):
        found = HeadHistory.load(tmp_path / kind)
        assert found.steps == [1, 2, 3]
        for name in found.measures:
            torch.testing.assert_close(found[name], monitor.history[name], atol=1e-5, rtol=1e-5, msg=f"{kind} {name}")
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{kind}-{rank}.pt"), found["logit"], atol=0, rtol=0)

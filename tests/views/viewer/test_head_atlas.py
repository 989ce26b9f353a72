"""The atlas of the viewer: roles and clusters are those of the lens, in parts, of long texts, and in pages."""

import json

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape, head_clusters, head_roles
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.views.export import PageBuilder
from regard.views.viewer import head_atlas as module
from regard.views.viewer.api import ViewerApi
from regard.views.viewer.captures import ApiError
from regard.views.viewer.describe import Capture
from regard.views.viewer.worker import Worker
from tests.lens.analysis.test_head_roles import planted_tape, texts, words

N = 60


@pytest.fixture
def asked():
    workers = []

    def ask(tape):
        workers.append(Worker())
        return ViewerApi([Capture(tape, "one")], workers[-1])

    yield ask
    for worker in workers:
        worker.close()


def two_layers(n=N):
    """Two layers of four heads over two texts that repeat words."""
    ids = texts(2, n)
    q, k = torch.randn(2, 2, 4, n, 8, generator=torch.Generator().manual_seed(0))
    tape = Tape({("a", 0): weights(2 * q, k, mask=Causal()), ("b", 0): weights(q, k, mask=Causal())})
    tape.tokens = words(ids)
    return tape


def heads_of(clusters):
    return sorted((layer, head) for cluster in clusters for layer, head in cluster)


def test_roles_are_those_of_the_lens(asked):
    tape, roles, _ = planted_tape()
    found = json.loads(asked(tape).roles(0, 0))
    assert [", ".join(own) for own in found["roles"]] == roles
    table = head_roles(tape)
    for head, scores in enumerate(found["scores"]):
        for name, score in scores.items():
            assert score == pytest.approx(table[name][head], rel=1e-5)
    assert found["thresholds"]["sink"] == 0.3
    assert found["notes"] == []


def test_roles_of_a_few_heads_at_a_time_are_the_same(asked, monkeypatch):
    tape = two_layers()
    whole = asked(tape).roles(0, 1)
    monkeypatch.setattr(module, "MAX_STEP_WEIGHTS", module.PASSES * 2 * N * N)
    assert asked(tape).roles(0, 1) == whole
    monkeypatch.setattr(module, "MAX_STEP_WEIGHTS", 100)
    with pytest.raises(ApiError, match="the roles of heads over a text of this length take too long here"):
        asked(tape).roles(0, 1)


def test_texts_that_are_short_or_have_no_tokens_are_named(asked):
    q, k = torch.randn(2, 1, 2, 9, 8)
    found = json.loads(asked(Tape({("a", 0): weights(q, k)})).roles(0, 0))
    assert found["scores"][0]["induction"] is None
    assert [note.split()[0] for note in found["notes"]] == ["without", "in"]


def test_clusters_are_those_of_the_lens(asked):
    tape = two_layers()
    found = json.loads(asked(tape).clusters(0))
    table = head_clusters(tape)
    names = [key[0] for key in tape]
    order = [[names[layer], head, n] for n, cluster in enumerate(found["clusters"]) for layer, head in cluster]
    assert order == [list(row) for row in zip(table["layer"], table["head"], table["cluster"], strict=True)]
    assert (found["state"], found["cell"]) == ("exact", [1, 1])


def test_clusters_of_long_texts_are_of_cells_and_say_so(asked, monkeypatch):
    monkeypatch.setattr(module, "MAX_PRODUCTS", 1)
    tape = two_layers()
    found = json.loads(asked(tape).clusters(0))
    assert (found["state"], found["cell"]) == ("pooled", [2, 2])
    assert heads_of(found["clusters"]) == [(layer, head) for layer in (0, 1) for head in range(4)]
    short = json.loads(asked(two_layers(40)).clusters(0))
    assert (short["state"], short["cell"]) == ("exact", [1, 1])  # each cell of a thumbnail is one weight


def test_layers_of_measures_have_no_roles_and_clusters_by_their_maps(asked):
    kept = {"pool:8": TensorInMemory(torch.rand(1, 2, 8, 8)), "max": TensorInMemory(torch.rand(1, 2, 20))}
    tape = Tape({("measured", 0): Reduced(torch.Size((1, 2, 20, 20)), kept)})
    with pytest.raises(ApiError, match="only measures"):
        asked(tape).roles(0, 0)
    found = json.loads(asked(tape).clusters(0))
    assert heads_of(found["clusters"]) == [(0, 0), (0, 1)]
    assert found["state"] == "pooled"


def test_a_page_holds_roles_clusters_and_predictions():
    tape = two_layers()
    logits, ids = torch.randn(2, N, 11), torch.randint(11, (2, N))
    tape.predict(logits, ids)
    worker = Worker()
    found = PageBuilder([Capture(tape, "one")], worker, [tape], 4.7).build()
    worker.close()
    names = {"clusters?capture=0", "roles?capture=0&layer=0", "roles?capture=0&layer=1"}
    names |= {f"predictions?capture=0&layer=0&batch={row}" for row in range(2)}
    assert {name for name in found if name.startswith(("clusters", "roles", "predictions"))} == names

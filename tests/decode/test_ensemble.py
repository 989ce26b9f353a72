"""Ensembles are steppers: of one they are that one, of several their mean."""

from __future__ import annotations

import pytest
import torch

from regard.decode import Ensemble, beam, greedy, sample, score
from tests.decode.steppers import Recurrent, Table, flat

SOURCE, PREFIX, LIMITS = torch.arange(5), [[0], [1, 2], [3], [4], [5]], {"end": 8, "max_length": 9}


def average(models, mean):
    """One table that says what the ensemble should."""
    logits = torch.stack([model.logits for model in models])
    whole = Table(9, 0)
    whole.logits = logits.softmax(-1).mean(0).log() if mean == "probabilities" else logits.mean(0)
    return whole


@pytest.mark.parametrize("mean", ["probabilities", "logits"])
def test_an_ensemble_of_one_is_the_model(mean):
    model = Table(9, 0)
    one = Ensemble([model], mean=mean)
    for search in (greedy, lambda *a, **k: beam(*a, width=4, n_best=4, **k), lambda *a, **k: sample(*a, seed=0, **k)):
        alone, together = (search(each, SOURCE, PREFIX, **LIMITS) for each in (model, one))
        if search is not greedy:
            alone, together = flat(alone), flat(together)
        assert [one.tokens for one in alone] == [one.tokens for one in together]
        assert [one.score for one in alone] == pytest.approx([one.score for one in together])


@pytest.mark.parametrize("mean", ["probabilities", "logits"])
def test_an_ensemble_is_the_mean_of_its_members(mean):
    models = [Table(9, seed) for seed in range(3)]
    together, whole = Ensemble(models, mean=mean), average(models, mean)
    found = beam(together, SOURCE, PREFIX, width=4, n_best=3, **LIMITS)
    expected = beam(whole, SOURCE, PREFIX, width=4, n_best=3, **LIMITS)
    assert [[one.tokens for one in best] for best in found] == [[one.tokens for one in best] for best in expected]
    forced = score(together, SOURCE, PREFIX, [[one.tokens for one in best] for best in found])
    for a, b, c in zip(flat(found), flat(expected), flat(forced), strict=True):
        assert a.log_probabilities == pytest.approx(b.log_probabilities)
        assert c.log_probabilities == pytest.approx(b.log_probabilities)


def test_the_two_means_differ_where_members_disagree():
    models = [Table(9, seed, sharpness=4.0) for seed in range(2)]
    one, two = (greedy(Ensemble(models, mean=mean), SOURCE, PREFIX, **LIMITS) for mean in ("probabilities", "logits"))
    assert [h.tokens for h in one] != [h.tokens for h in two]


def test_members_keep_their_attention_under_their_numbers():
    models = [Recurrent(seed=seed) for seed in range(2)]
    source = torch.randint(1, 11, (2, 4))
    found = beam(Ensemble(models), source, [[0], [1]], width=3, end=10, max_length=6)
    targets = [[one.tokens for one in best] for best in found]
    for number, model in enumerate(models):
        alone = score(model, source, [[0], [1]], targets)
        for one, forced in zip(flat(found), flat(alone), strict=True):
            torch.testing.assert_close(one.attention[f"{number}.source"], forced.attention["source"])


def test_ensembles_say_what_they_cannot_do():
    with pytest.raises(ValueError, match="members must hold at least one stepper, got none"):
        Ensemble([])
    with pytest.raises(ValueError, match="mean must be 'probabilities' or 'logits', got 'median'"):
        Ensemble([Table(9, 0)], mean="median")
    with pytest.raises(
        ValueError, match=r"members must share one vocabulary, got logits of shapes \[\(5, 9\), \(5, 7\)\]"
    ):
        greedy(Ensemble([Table(9, 0), Table(7, 0)]), SOURCE, [[0]] * 5, end=3, max_length=4)

"""A DataLoader trains as it is, and a run that was interrupted ends as the one that was not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from regard.train import Constant, Recipe, checkpoint, fit
from regard.train.loader_epochs import LoaderEpochs


class Noisy(Dataset):
    """Numbers with noise drawn when they are read."""

    def __len__(self):
        return 20

    def __getitem__(self, n):
        return torch.tensor([float(n)]) + 0.1 * torch.rand(1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7.0)[:, None])


class Line(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(1, 1)

    def loss(self, x):
        return (self(x) - x / 2).square().mean()


def orders(loader, epochs=2, seed=0):
    batches = LoaderEpochs(loader, seed=seed)
    return [[batch.flatten().tolist() for batch in batches] for _ in range(epochs)]


def test_order_depends_on_seed_and_epoch_only():
    loader = DataLoader([torch.tensor(float(n)) for n in range(10)], batch_size=3, shuffle=True)
    torch.manual_seed(1)
    first = orders(loader)
    torch.manual_seed(2)
    assert orders(loader) == first
    assert orders(loader, seed=1) != first
    assert first[0] != first[1]
    assert sorted(number for batch in first[0] for number in batch) == list(range(10))


@pytest.mark.parametrize("place", range(9))
def test_restored_loader_goes_on_with_the_batches_that_follow(place):
    def loader():
        return LoaderEpochs(DataLoader(list(torch.arange(10.0)), batch_size=3, shuffle=True), seed=3)

    whole = loader()
    all_batches = [batch.tolist() for _ in range(3) for batch in whole]
    begun, seen = loader(), 0
    while seen < place:
        for _ in begun:
            seen += 1
            if seen == place:
                break
    resumed = loader()
    resumed.restore(begun.state())
    rest = [batch.tolist() for _ in range(4) for batch in resumed]
    assert rest[: 12 - place] == all_batches[place:]


@pytest.mark.parametrize("workers", [0, 2])
def test_run_that_is_resumed_ends_as_the_unbroken_one(tmp_path, workers):
    def train(folder, steps, resume=False):
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
        recipe = Recipe(steps=steps, rate=Constant(0.01), save_every=1, log_every=99)
        model = Line()
        fit(model, loader, recipe, folder=folder, resume=resume)
        return model

    unbroken = train(tmp_path / "a", 8)
    train(tmp_path / "b", 3)
    resumed = train(tmp_path / "b", 8, resume=True)
    assert torch.equal(unbroken.weight, resumed.weight)
    assert torch.equal(unbroken.bias, resumed.bias)
    assert checkpoint.find(tmp_path / "a").name == "step-00000008"


def test_stream_has_no_length_and_trains(tmp_path):
    outcome = fit(Line(), DataLoader(Stream(), batch_size=2), Recipe(epochs=2), folder=tmp_path)
    assert outcome.step == 8


def test_other_seed_is_refused():
    batches = LoaderEpochs(DataLoader([1, 2]), seed=1)
    with pytest.raises(ValueError, match="saved with seed=1, got seed=2; use the same"):
        LoaderEpochs(DataLoader([1, 2]), seed=2).restore(batches.state())
    assert batches.fingerprint() != LoaderEpochs(DataLoader([1, 3])).fingerprint()
    assert LoaderEpochs(DataLoader(Noisy())).fingerprint() is None

"""What any model that writes must do: checks over its forward pass, its steps and its loss."""

from __future__ import annotations

from itertools import accumulate, groupby, product
from random import Random

import pytest
import torch

from regard.decode import Ensemble, Gnmt, beam, greedy, score

D = torch.float64
START, END = 2, 3
SOURCES, VOCABULARY, B, N, M = 23, 19, 5, 9, 7  # of `pairs`, which encoder-decoders are tried on


def pairs(seed=0):
    """Random sources and targets of several lengths; as batches bring them."""
    random = torch.Generator().manual_seed(seed)
    source = torch.randint(4, SOURCES, (B, N), generator=random)
    return {"source": source, "source_lengths": torch.tensor([9, 4, 1, 6, 9]), **targets(B, M, VOCABULARY)}


def targets(b, m, vocabulary, seed=0):
    """Random targets of several lengths, the end behind each; as batches bring them."""
    random = torch.Generator().manual_seed(seed)
    target = torch.randint(4, vocabulary, (b, m), generator=random)
    lengths = torch.arange(b) % m + 1
    lengths[0] = m
    places = torch.arange(m)
    target[places == lengths[:, None] - 1] = END
    target[places >= lengths[:, None]] = 0
    return {"target": target, "target_lengths": lengths}


def begun(target):
    """The inputs of a target, written out."""
    return torch.tensor([[START, *row[:-1]] for row in target.tolist()])


def row_of(batch, n):
    """One row of a batch, without its padding."""
    one = {name: x[n : n + 1] for name, x in batch.items()}
    for name in ("source", "target"):
        if f"{name}_lengths" in one:
            one[name] = one[name][:, : int(one[f"{name}_lengths"])]
    return one


def stepped(model, batch, inputs, cuts):
    """The logits of all inputs, read in pieces; a piece of one token is a plain step."""
    state, logits = model.start(batch), []
    for piece in inputs.split(cuts, 1):
        if piece.shape[1] == 1:
            one, state = model.step(piece[:, 0], state)
            logits.append(one[:, None])
        else:
            some, state = model.step(piece, state)
            logits.append(some)
    return torch.cat(logits, 1)


def logits_of(model, batch, **options):
    """The logits of a batch of pairs, its targets as inputs."""
    return model(batch["source"], begun(batch["target"]), source_lengths=batch["source_lengths"], **options)


@torch.no_grad()
def any_chunking_gives_what_the_whole_pass_gives(model, batch, whole, *, ways=20):
    """So many ways to read the inputs in pieces, all at once and one by one among them."""
    inputs = begun(batch["target"])
    finest, *others, coarsest = product((1, 0), repeat=inputs.shape[1] - 1)  # 1 where a piece ends
    for ends in (finest, coarsest, *Random(0).sample(others, ways - 2)):
        cuts = [len(list(piece)) for _, piece in groupby(accumulate(ends, initial=0))]
        torch.testing.assert_close(stepped(model, batch, inputs, cuts), whole, rtol=0, atol=1e-10)


@torch.no_grad()
def a_row_alone_gives_what_it_gives_in_a_padded_batch(model):
    batch = pairs()
    together = logits_of(model, batch)
    for n in range(B):
        one = row_of(batch, n)
        alone = model(one["source"], begun(one["target"]))
        torch.testing.assert_close(together[n, : alone.shape[1]], alone[0])


@torch.no_grad()
def what_stands_in_the_padding_changes_nothing(model):
    batch = pairs()
    other = dict(batch)
    for name in ("source", "target"):
        x = torch.nn.functional.pad(batch[name], (0, 3), value=5)
        beyond = torch.arange(x.shape[1]) >= batch[f"{name}_lengths"][:, None]
        other[name] = torch.where(beyond, 7, x)
    ours, theirs = model.loss(batch), model.loss(other)
    torch.testing.assert_close(ours.sum, theirs.sum)
    assert int(ours.count) == int(theirs.count) == int(batch["target_lengths"].sum())


@torch.no_grad()
def batch_order_changes_nothing(model):
    batch, order = pairs(), torch.tensor([3, 0, 4, 2, 1])
    moved = {name: x[order] for name, x in batch.items()}
    torch.testing.assert_close(logits_of(model, moved), logits_of(model, batch)[order])


@torch.no_grad()
def a_state_may_be_stepped_from_twice(model):
    state = model.start(pairs())
    _, state = model.step(torch.full((B,), START), state)
    tokens = torch.arange(4, 4 + B)
    first, _ = model.step(tokens, state)
    model.step(tokens + 1, state)
    assert torch.equal(model.step(tokens, state)[0], first)


@torch.no_grad()
def no_logit_sees_the_token_it_predicts(model):
    batch = pairs()
    inputs = begun(batch["target"])
    before = model(batch["source"], inputs)
    inputs[:, 4] = (inputs[:, 4] + 1) % VOCABULARY
    after = model(batch["source"], inputs)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=1e-12)
    assert (before[:, 4] - after[:, 4]).abs().amax(-1).min() > 1e-3


def an_ensemble_of_one_writes_what_the_model_writes(model):
    both = [greedy(stepper, pairs(), [[START]] * B, end=END, max_length=8) for stepper in (model, Ensemble([model]))]
    assert [one.tokens for one in both[0]] == [one.tokens for one in both[1]]


def by_hand(logits, target, lengths, smoothing=0.0):
    """The summed cross entropy of the real tokens, a loop over them."""
    total = 0.0
    for row in range(len(target)):
        for t in range(int(lengths[row])):
            logp = logits[row, t].double().log_softmax(-1)
            total += -(1 - smoothing) * float(logp[target[row, t]]) - smoothing * float(logp.mean())
    return total


def decoded_attention_is_that_of_the_hypotheses(stepper, batch, name, rows):
    """Beams, reordered at every step, against each hypothesis read by itself."""
    prefix = [[START]] * rows
    found = beam(stepper, batch, prefix, width=4, n_best=3, end=END, max_length=7)
    again = score(stepper, batch, prefix, [[one.tokens for one in best] for best in found])
    both = [pair for rows in zip(found, again, strict=True) for pair in zip(*rows, strict=True)]
    assert any(len({one.tokens[:-1] for one in best}) > 1 for best in found)
    for one, forced in both:
        A = one.attention[name]  # read beside longer ones, a hypothesis has more keys of its own, all of them unseen
        torch.testing.assert_close(A, forced.attention[name][..., : A.shape[-1]])
        torch.testing.assert_close(one.log_probability, forced.log_probability, rtol=0, atol=1e-9)


def beam_never_scores_below_greedy(model, batch):
    """Under the same length norm; for a model that has begun to learn, as one that has not may lose its way."""
    prefix, limits = [[START]] * len(batch["source"]), {"end": END, "max_length": 9}
    paths = greedy(model, batch, prefix, **limits)
    for length in (lambda n: 1.0, float, Gnmt(0.6)):
        found = beam(model, batch, prefix, width=5, length=length, **limits)
        norms = [path.log_probability / length(len(path.tokens)) for path in paths]
        gains = [best[0].score - norm for best, norm in zip(found, norms, strict=True)]
        assert min(gains) > -1e-5
        assert max(gains) > 0.01


def trained(model, batch_at, *, steps, rate):
    """The model after Adam with clipped gradients and a rate that falls to 0."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        model.loss(batch_at(step)).mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def accuracy(model, batch):
    """The share of rows whose whole target greedy search writes."""
    b, m = batch["target"].shape
    found = greedy(model, batch, [[START]] * b, end=END, max_length=m)
    right = [
        list(one.tokens) == row[:length]
        for one, row, length in zip(found, batch["target"].tolist(), batch["target_lengths"].tolist(), strict=True)
    ]
    return sum(right) / b


def wrong_batches_are_refused(model, batch, tokens=(99, -1)):
    """Lengths, targets and names that cannot be: each is answered in words."""
    b, m = batch["target"].shape
    wrong = [
        (
            {"target_lengths": torch.full((b,), m + 2)},
            ValueError,
            f"target_lengths must be .* from 0 to {m}, .* got {m + 2}",
        ),
        ({"target_lengths": torch.full((b,), -1)}, ValueError, f"target_lengths must be .* from 0 to {m}, .* got -1"),
        ({"target_lengths": torch.ones(b)}, TypeError, "target_lengths must hold whole numbers, got torch.float32"),
        ({"target_lengths": torch.ones(b + 1).long()}, ValueError, f"target_lengths must be .* got {b + 1} numbers"),
        (
            {"target_lengths": torch.ones(b, m).bool()},
            TypeError,
            "target_lengths must be the .* got torch.bool",
        ),
        ({"target": batch["target"][0]}, ValueError, r"target must have dims b n, got shape \(.*write target\[None\]"),
        ({"target": batch["target"] - 99}, ValueError, "ids must be from 0 to .*, the rows of this table, got -"),
    ]
    for values, error, message in wrong:
        with pytest.raises(error, match=message):
            model.loss({**batch, **values})
    for name in [name for name in batch if "lengths" not in name]:
        with pytest.raises(ValueError, match=f"the batch must hold .*'target', got .*; add '{name}'"):
            model.loss({key: x for key, x in batch.items() if key != name})
    for source in (None, torch.zeros(2, 3)):
        with pytest.raises(TypeError, match=rf"a batch must be a mapping .*, got {type(source).__name__}; pass {{'"):
            beam(model, source, [[START]] * 2, width=2, end=END, max_length=3)
    for token in tokens:
        with pytest.raises(ValueError, match=f"ids must be from 0 to .*, the rows of this table, got {token}; encode"):
            greedy(model, batch, [[token]] * b, end=END, max_length=3)


def wrong_sources_are_refused(model, batch):
    """The same of what an encoder reads."""
    b, n = batch["source"].shape
    wrong = [
        ({"source_lengths": torch.full((b,), n + 2)}, ValueError, f"engths must be .*from 0 to .*{n}.* got {n + 2}"),
        ({"source_lengths": torch.full((b,), -1)}, ValueError, f"engths must be .*from 0 to .*{n}.* got -1"),
        ({"source_lengths": torch.ones(b)}, TypeError, "engths must hold whole numbers, got torch.float32"),
        ({"source_lengths": torch.ones(b, n).bool()}, TypeError, "engths must be the number of .* got torch.bool"),
        ({"source": batch["source"] + 99}, ValueError, "ids must be from 0 to .*, the rows of this table, got 1"),
    ]
    for values, error, message in wrong:
        with pytest.raises(error, match=message):
            model.loss({**batch, **values})
    for lengths, error, message in (
        (torch.ones(b, n).bool(), TypeError, "source_lengths must be the number of .* got torch.bool"),
        (torch.tensor([n]), ValueError, f"source_lengths must be one number per row, .* for {b} rows, got 1 numbers"),
        ([n] * b, TypeError, "source_lengths must be a tensor, got list"),
    ):
        with pytest.raises(error, match=message):
            model.start({**batch, "source_lengths": lengths})
    with pytest.raises(ValueError, match=r"source must have dims b n, got shape \(.*write source\[None\]"):
        model(batch["source"][0], batch["target"][:1])
    with pytest.raises(ValueError, match=r"inputs must have dims b n, got shape \(.*write inputs\[None\]"):
        model(batch["source"][:1], batch["target"][0])

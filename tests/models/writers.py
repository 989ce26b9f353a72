"""What any model that writes must do: checks over its forward pass, its steps and its loss."""

from __future__ import annotations

import torch

from regard.decode import beam, greedy, score

D = torch.float64
START, END = 2, 3


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
    pairs = [pair for both in zip(found, again, strict=True) for pair in zip(*both, strict=True)]
    assert any(len({one.tokens[:-1] for one in best}) > 1 for best in found)
    for one, forced in pairs:
        A = one.attention[name]  # read beside longer ones, a hypothesis has more keys of its own, all of them unseen
        torch.testing.assert_close(A, forced.attention[name][..., : A.shape[-1]])
        torch.testing.assert_close(one.log_probability, forced.log_probability, rtol=0, atol=1e-9)


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

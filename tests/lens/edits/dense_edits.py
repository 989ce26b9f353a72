"""The definition of edits: one matrix of scores, changed entry by entry."""

import torch
from torch.overrides import TorchFunctionMode

from regard.lens import Boost, Cut, Only, Scale, Temperature

SOFTMAX = (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)


def dense_edited(q, k, v, edits, *, keep=None, bias=None, real=None):
    """b h i e, and the weights b h i j, in float64. `real` is `b j`."""
    q, k, v = (x.double() for x in (q, k, v))
    h = q.shape[1]
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
    weights = edited_scores(scores, edits, real).softmax(-1).nan_to_num(0.0)
    return weights @ v * factors(edits, h)[:, None, None], weights


def factors(edits, h):
    """The factor of each of h heads."""
    factors = torch.ones(h, dtype=torch.float64)
    for edit in edits:
        if isinstance(edit, Scale):
            for head in edit.heads:
                factors[head] *= edit.factor
        if isinstance(edit, Only):
            for head in set(range(h)) - set(edit.heads):
                factors[head] = 0
    return factors


def edited_scores(scores, edits, real=None):
    """b h i j, with -inf where a query may not see a key."""
    b, h, i, j = scores.shape
    scores, hidden = scores.clone(), torch.zeros_like(scores, dtype=torch.bool)
    real = torch.ones(b, j, dtype=torch.bool) if real is None else real
    for edit in edits:
        for head in range(h) if edit.heads is None else edit.heads:
            if isinstance(edit, Temperature):
                scores[:, head] = scores[:, head] / edit.factor
            if isinstance(edit, (Cut, Boost)):
                for n in range(b):
                    for row in picked(edit.queries, real[n] if i == j else torch.ones(i)):
                        for col in picked(edit.keys, real[n]):
                            if isinstance(edit, Cut):
                                hidden[n, head, row, col] = True
                            else:
                                scores[n, head, row, col] = scores[n, head, row, col] + edit.amount
    return scores.masked_fill(hidden, -torch.inf)


def picked(selection, tokens):
    """The places of the selected tokens; False is padding, which has no position."""
    places = [n for n, is_real in enumerate(tokens.tolist()) if is_real]
    if selection is None:
        return places
    if isinstance(selection, int):
        return places[selection:][:1]
    return places[selection] if isinstance(selection, slice) else [places[n] for n in selection]


class EditedSoftmax(TorchFunctionMode):
    """Edits every softmax over scores of queries and keys, as models compute them by hand."""

    def __init__(self, edits, real=None):
        super().__init__()
        self.edits, self.real, self.count = edits, real, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in SOFTMAX or args[0].ndim != 4:
            return func(*args, **(kwargs or {}))
        self.count += 1
        whole = args[0].clamp(min=torch.finfo(args[0].dtype).min / 8)
        j = whole.shape[3] - (whole.shape[3] % 2 == 0)  # texts have odd lengths; one more is the logit of a sink
        real = self.real if self.real is None or self.real.shape[1] == j else None
        scores = torch.cat((edited_scores(whole[..., :j], self.edits, real), whole[..., j:]), -1)
        weights = func(scores, *args[1:], **(kwargs or {}))
        return weights * factors(self.edits, weights.shape[1])[:, None, None].to(weights)

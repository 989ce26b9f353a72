"""Trace: each hypothesis takes its own tokens and attention along, however the rows are reordered."""

from __future__ import annotations

import torch

from regard.decode import Gnmt, beam
from tests.decode.steppers import Cached, D, Table


def test_attention_follows_its_hypothesis_through_every_reordering():
    model, source, prefix = Table(8, 4, sharpness=0.5), torch.tensor([3, 1, 4, 1]), [[0, 5], [1], [2, 2, 2], [1]]
    found = beam(model, source, prefix, width=6, n_best=6, end=7, max_length=11, length=Gnmt(1.0))
    for row, best in enumerate(found):
        for one in best:
            codes = torch.tensor(model.codes(source[row].item(), prefix[row], one.tokens), dtype=D)
            assert torch.equal(one.attention["code"], torch.stack([codes, codes.sqrt()])[..., None])


def test_attention_over_a_growing_source_is_that_of_reading_the_whole():
    model = Cached()
    prefix = torch.randint(13, (3, 4))
    for best in zip(prefix, beam(model, 3, prefix, width=4, end=12, max_length=9, n_best=2), strict=True):
        for one in best[1]:
            tokens = torch.cat([best[0], torch.tensor(one.tokens)])[None, :-1]
            _, state = model.step(tokens, model.start(1))
            for layer in ("0.self", "1.self"):
                whole = state.attention[layer][0, :, 3:]
                torch.testing.assert_close(one.attention[layer], whole)
                assert one.attention[layer].shape == (3, len(one.tokens), 3 + len(one.tokens))

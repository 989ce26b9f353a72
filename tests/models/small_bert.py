"""A small Bert with loud weights, and texts of several lengths for it."""

from __future__ import annotations

import torch

from regard.models import BertConfig

D = torch.float64
CONFIG = BertConfig(vocabulary=29, length=24, dim=12, depth=2, heads=3, hidden=20, dropout=0.0, attention_dropout=0.0)
LENGTHS = torch.tensor([11, 3, 7])


def loud(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.to(D).eval()


def close(x, y, tolerance=1e-10):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def text(side="right"):
    keep = torch.arange(11) < LENGTHS[:, None]
    return torch.randint(1, 29, (3, 11)), torch.randint(0, 2, (3, 11)), keep.flip(1) if side == "left" else keep

# One layer for each mask, over the same words: point at a row to read which words it may see.
import torch
from torch import nn

from regard import Causal, Chunked, Diagonal, Prefix, Window
from regard.lens import capture
from regard.nn import Attention

torch.manual_seed(0)
words = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired"]
masks = {
    "causal": Causal(),
    "prefix": Causal() | Prefix(4),
    "window": Causal() & Window(3),
    "without-itself": ~Diagonal(),
    "chunks": Causal() & Chunked(5),
}
model = nn.Sequential()
for name, mask in masks.items():
    model.add_module(name, Attention(32, heads=1, mask=mask))
with capture(model, words) as tape, torch.no_grad():
    model(torch.randn(1, len(words), 32))
tape

# Queries, keys and values of one layer, untrained: every row of the matrix is a mixture that sums to one.
import torch

from regard.lens import capture
from regard.nn import Attention

torch.manual_seed(0)
words = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired"]
layer = Attention(32, heads=2)
vectors = {word: torch.randn(32) for word in words}
x = torch.stack([vectors[word] for word in words])[None]  # the same word, the same vector
with capture(layer, words) as tape, torch.no_grad():
    layer(x)
tape

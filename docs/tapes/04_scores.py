# The same queries and keys at three temperatures: nearly one key, the scaled product, nearly the mean of all keys.
import torch
from torch import nn

from regard import Dot
from regard.lens import capture
from regard.nn import Attention

torch.manual_seed(0)
words = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired"]
first = Attention(32, heads=2, score=Dot(scale=4.0))
layers = nn.ModuleDict({"cold": first})
for name, scale in (("warm", 0.25), ("hot", 0.02)):
    layers[name] = Attention(32, heads=2, score=Dot(scale=scale))
    layers[name].load_state_dict(first.state_dict())
x = torch.randn(1, len(words), 32) * 2


class AtThreeTemperatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return [layer(x) for layer in self.layers.values()]


model = AtThreeTemperatures()
with capture(model, words) as tape, torch.no_grad():
    model(x)
tape

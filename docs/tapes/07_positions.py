# The same word ten times: only the position can tell the tokens apart.
import torch
from torch import nn

from regard import Alibi, Causal
from regard.lens import capture
from regard.nn import Attention, Rotary

torch.manual_seed(0)
words = ["word"] * 10
model = nn.Sequential()
model.add_module("no-position", Attention(32, heads=2, mask=Causal()))
model.add_module("rotary", Attention(32, heads=2, mask=Causal(), rotary=Rotary(16, base=20.0)))
model.add_module("alibi", Attention(32, heads=2, mask=Causal(), bias=Alibi(2)))
x = torch.randn(1, 1, 32).expand(1, 10, 32) * 2
with capture(model, words) as tape, torch.no_grad():
    for layer in model:
        layer(x)
tape

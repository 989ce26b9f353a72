# 48 tokens: a window, a stride, and both with two global tokens.
import torch
from torch import nn

from regard import Causal, Dilated, Global, Window
from regard.lens import capture
from regard.nn import Attention

torch.manual_seed(0)
n = 48
model = nn.Sequential()
model.add_module("window", Attention(32, heads=1, mask=Causal() & Window(8)))
model.add_module("stride", Attention(32, heads=1, mask=Causal() & Dilated(n, 8)))
model.add_module("global", Attention(32, heads=1, mask=Causal() & (Window(8) | Global(2))))
with capture(model, [str(i) for i in range(n)]) as tape, torch.no_grad():
    model(torch.randn(1, n, 32))
tape

# How much each written digit depends on each digit that was read, by gradients, drawn as weights: through one vector
# ("one"), and with the next chapter's attention to all states ("all").
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import capture
from regard.models import Seq2Seq, Seq2SeqConfig


def dependence(attention):
    """Train a model to write numbers backwards; return the share of each input in each digit it writes, m n."""
    torch.manual_seed(0)
    sizes = {"source_vocabulary": 12, "target_vocabulary": 12, "start": 0, "dim": 32, "hidden": 32, "dropout": 0.0}
    model = Seq2Seq(Seq2SeqConfig(attention=attention, **sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        digits = torch.randint(2, 12, (64, 8))
        optimizer.zero_grad()
        model.loss({"source": digits, "target": digits.flip(1)}).mean.backward()
        optimizer.step()
    read = []
    model.encoder.embedding.register_forward_hook(lambda *call: read.append(call[-1]))
    digits = torch.randint(2, 12, (64, 8))
    written = digits.flip(1)
    logits = model(digits, F.pad(written, (1, -1), value=0)).gather(2, written[..., None])[..., 0]  # b m
    slopes = [torch.autograd.grad(logits[:, i].sum(), read[0], retain_graph=True)[0].norm(dim=-1) for i in range(8)]
    shares = torch.stack(slopes, 1).mean(0)
    return shares / shares.sum(-1, keepdim=True)


class Drawn(nn.Module):
    """A matrix of shares, drawn as the attention weights that the viewer knows."""

    def __init__(self, shares):
        super().__init__()
        self.shares = shares

    def forward(self):
        scores, unit = self.shares.log()[None, None], torch.eye(len(self.shares))[None, None]
        return F.scaled_dot_product_attention(scores, unit, unit, scale=1.0)  # softmax(log A) = A


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.all = Drawn(dependence(None)), Drawn(dependence("bahdanau"))

    def forward(self):
        return self.one(), self.all()


places = [f"digit {n}" for n in range(1, 9)]
model = Both()
with capture(model, {"*": (places[::-1], places)}) as tape, torch.no_grad():
    model()
tape

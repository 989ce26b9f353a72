"""Forms of attention, and layers like it, that are not on the tape but named."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import tests.lens.graph_layers as graphs
from tests.lens.fake_kernels import Opaque
from tests.lens.unseen_layers import DIM, AttentionPool, Compiled, GATConv, Layer, N, renamed, sigmoid

from .form import AUDIT, REFUSED, UNSEEN, Example, Form, beside


class RunningMean(nn.Module):
    """Mixes positions without attention weights."""

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def known(name, module="somewhere"):
    """Return the builder of a layer of a class with this name, which a table of the lens knows."""
    return beside(type(name, (RunningMean,), {"__module__": module}))


def linear(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class Experts(nn.Module):
    """A gate over four experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 4), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        return (self.gate(x).softmax(-1)[..., None] * torch.stack([expert(x) for expert in self.experts], -2)).sum(-2)


def soft_argmax(q, k, v):
    places = torch.linspace(0, 1, N)[:, None].expand(N, DIM)
    return (q @ k.mT).softmax(-1) @ places


def routing(q, k, v):
    logits = torch.zeros(len(v), N, N)
    for _ in range(3):
        out = logits.softmax(-1) @ v
        logits = logits + out @ v.mT
    return out


def unused(q, k, v):
    """A softmax of scores that multiplies no values."""
    return v * (q @ k.mT).softmax(-1).square().sum(-1, keepdim=True).cumsum(1)


def scaled_scores(q, k, v):
    q, k, v = (x[:, None] for x in (q, k, v))
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * (1 + j)).squeeze(1)


def wrong_kernel(q, k, v):
    return Opaque.apply(q, k, v)


def causal_kernel(q, k, v):
    return wrong_kernel(*(x[:, None] for x in (q, k, v))).squeeze(1)


class Graph(nn.Module):
    """A layer of the stand-in for torch_geometric over a ring of the tokens of a text."""

    def __init__(self, **given):
        super().__init__()
        self.reduce, self.conv = nn.Linear(DIM, graphs.WIDTH), graphs.GATConv(**given)

    def forward(self, x):
        ids = torch.arange(N)
        return self.conv(self.reduce(x[0]), torch.stack((ids.repeat(2), torch.cat((ids.roll(1), ids.roll(2))))))


def message_and_value(A, values):
    return A[..., None] * values + values


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x):
        return self.conv(x.mT).mT


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool1d(3, 1, 1)

    def forward(self, x):
        return self.pool(x.mT).mT


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


class Cosines(nn.Module):
    """Weights that a sigmoid makes of cosines, for a weighted maximum."""

    def forward(self, x):
        cosines = F.cosine_similarity(x[:, :, None], x[:, None], dim=-1)
        return (cosines.mul(9).sigmoid()[..., None] * x[:, None]).amax(2)


def traced_model():
    x = torch.randn(2, N, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Example(model=torch.jit.trace(Layer(sigmoid), x), inputs=[x])


MIXERS = "Mamba, delta rule, linear attention and other known mixers"
LIKE = "gates of experts, soft-argmax, routing"
OPAQUE = "functions of `torch.compile`, kernels that do something else"
REST = "all other code that mixes positions"
MODELS = "scripted and traced models"
# Classes of each kind in `known_mixers`, as the docs name them, and one of them with its module.
CLASSES = {
    "delta rule": ("GatedDeltaNet, DeltaNet, KimiDeltaAttention", "Qwen3NextGatedDeltaNet", ""),
    "state space": ("Mamba, Mamba2, S4, S5, SS2D, Hyena, H3", "MambaMixer", ""),
    "linear recurrence": ("RWKV, RG-LRU, xLSTM, HGRN", "RwkvSelfAttention", ""),
    "retention": ("RetNet", "MultiScaleRetention", ""),
    "linear attention": ("Performer, LiteMLA, lambda and attention-free layers", "LinearAttention", ""),
    "deformable attention": ("MSDeformAttn by kernels of its own, without `F.grid_sample`", "MSDeformAttn", ""),
    "graph attention": ("GATConv, TransformerConv by other code than the known edge softmax", "", ""),
    "Fourier mixing": ("FNet, AFNO, GlobalFilter, FEDformer", "AFNO2D", ""),
    "autocorrelation": ("Autoformer", "AutoformerAttention", ""),
    "hashed attention": ("Reformer", "LSHSelfAttention", ""),
    "low-rank attention": ("Nystromformer", "NystromAttention", ""),
    "token-mixing MLP": ("MLP-Mixer, ResMLP, gMLP of timm", "MixerBlock", "timm.models.mlp_mixer"),
    "gated convolution": ("LFM2", "Lfm2ShortConv", ""),
}
FORMS = (
    *(
        Form(
            name=name,
            family=MIXERS,
            outcome=UNSEEN,
            shown=kind,
            examples=[known(example, module or "somewhere") if example else beside(GATConv)],
        )
        for kind, (name, example, module) in CLASSES.items()
    ),
    Form(
        name="layers of torch_geometric that add to the messages, or take their mean or maximum",
        family=OPAQUE,
        outcome=UNSEEN,
        shown="graph attention",
        library="graph_libraries",
        examples=[beside(partial(Graph, message=message_and_value)), beside(partial(Graph, reduce="mean"))],
    ),
    *(
        Form(name=name, family=family, outcome=UNSEEN, shown=kind, examples=[beside(build)])
        for name, family, kind, build in (
            ("a softmax over feature channels", LIKE, "linear attention", lambda: Layer(linear)),
            ("gates of experts", LIKE, "expert gate", Experts),
            ("a softmax that averages coordinates", LIKE, "soft-argmax", lambda: Layer(soft_argmax)),
            ("routing of capsules", LIKE, "fixed weights", lambda: Layer(routing)),
            ("a softmax of q-k scores that multiplies no values", OPAQUE, "softmax", lambda: Layer(unused)),
            ("a `score_mod` that multiplies scores", OPAQUE, "attention", lambda: Layer(scaled_scores)),
            ("attention inside a function of `torch.compile`", OPAQUE, "compiled function", Compiled),
        )
    ),
    Form(
        name="a kernel that does not do what its arguments say",
        family=OPAQUE,
        outcome=UNSEEN,
        shown="attention",
        library="registered_kernels",
        examples=[beside(lambda: Layer(causal_kernel))],
    ),
    *(
        Form(name=name, family=family, outcome=AUDIT, shown=kind, examples=[beside(build)])
        for name, family, kind, build in (
            ("any other code that mixes positions", REST, "mixes positions", Cosines),
            ("weights over a few neighbours, by a softmax", REST, "attention", renamed(AttentionPool)),
            ("convolutions", REST, "convolution", Convolution),
            ("pooling", REST, "pooling", Pooling),
            ("recurrent layers", REST, "recurrence", Recurrence),
        )
    ),
    Form(
        name="a scripted or traced model",
        family=MODELS,
        outcome=REFUSED,
        shown="a scripted model runs outside Python",
        examples=[traced_model],
    ),
)

"""Known classes of layers that mix positions without attention weights that capture can record.

    kind                  classes, of any library unless a library is given
    delta rule            GatedDeltaNet, DeltaNet, KimiDeltaAttention
    state space           Mamba, Mamba2, S4, S5, SS2D, Hyena, H3
    linear recurrence     RWKV, RG-LRU, xLSTM, HGRN
    retention             MultiScaleRetention
    linear attention      LinearAttention, LightningAttention, Performer, LiteMLA, lambda and attention-free layers
    deformable attention  MSDeformAttn, MultiScaleDeformableAttention
    graph attention       GATConv, GATv2Conv, TransformerConv, HGTConv (torch_geometric, dgl)
    Fourier mixing        FNet, AFNO, GlobalFilter, FEDformer
    autocorrelation       Autoformer
    hashed attention      Reformer
    low-rank attention    Nystromformer
    token-mixing MLP      MLP-Mixer, ResMLP, gMLP (timm)
    gated convolution     LFM2

A layer of such a class that ran and left no entry on the tape, itself or in a part of it, goes to `tape.unseen`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from torch import nn


class KnownMixer(NamedTuple):
    """Classes of one kind of mixer, by regular expressions on the name of the class and of its Python module."""

    kind: str
    name: str
    reason: str
    file: str = ""


NO_WEIGHTS = "keeps a state of fixed size and has no weights of queries over keys"
FACTORED = "never forms weights of queries over keys"
FIXED = "mixes positions with the same numbers for every input and has no attention weights"
KNOWN = (
    KnownMixer("delta rule", r"Delta(Net|Rule|Attention|Product)", f"the delta rule {NO_WEIGHTS}"),
    KnownMixer("state space", r"Mamba|^FalconH1Mixer$|SS2D|SSM", f"a state space layer {NO_WEIGHTS}"),
    KnownMixer("state space", r"^(S4|S4D|S5|H3)(Block|Layer|Conv)?$", f"a state space layer {NO_WEIGHTS}"),
    KnownMixer("state space", r"Hyena", "a Hyena layer is a long convolution and has no attention weights"),
    KnownMixer("linear recurrence", r"(?i)RWKV\w*(Attention|T_?(ime_?)?mix)", f"an RWKV layer {NO_WEIGHTS}"),
    KnownMixer(
        "linear recurrence",
        r"(?i)RG_?LRU|^[ms]LSTM(Layer|Cell|Block)|^xLSTM(Layer|Block)|HGRN",
        f"a linear recurrence {NO_WEIGHTS}",
    ),
    KnownMixer("retention", r"Retention|(?i:RetNet)\w*Attention", f"a retention layer {FACTORED}"),
    KnownMixer(
        "linear attention",
        r"Linear(Self|Cross)?Att(entio)?n|LinAttn|LightningAttention|LiteMLA|Performer\w*Attention|GatedSlotAttention"
        r"|EfficientAttention$|EfficientAdditiveAttention|AttentionFree|^AFT(Full|Simple|Local)$|FactorAttn|XCA$",
        f"linear attention {FACTORED}",
    ),
    KnownMixer("linear attention", r"^FastAttention$", f"linear attention {FACTORED}", r"performer"),
    KnownMixer("linear attention", r"^LambdaLayer$", f"a lambda layer {FACTORED}", r"lambda"),
    KnownMixer("linear attention", r"Attention$|GLA", f"linear attention {FACTORED}", r"^fla\.layers\.(?!attn$)"),
    KnownMixer(
        "deformable attention",
        r"Deform(able)?\w*Att(entio)?n$|^DAttention",
        "it summed no points of F.grid_sample by weights, so the points that it sampled are unknown",
    ),
    KnownMixer(
        "graph attention",
        r"GAT(v2)?(Conv|Layer)$|^Graph\w*Attention|^(Transformer|HGT|HAN|HEAT|DotGat|PointTransformer|AGNN)Conv$",
        "it called no edge softmax of torch_geometric or dgl, so the weights of its edges are unknown",
    ),
    KnownMixer(
        "Fourier mixing",
        r"Fourier(Transform|Mix\w*|Block|CrossAttention|Attention)$|GlobalFilter$|AFNO|^SpectralConv",
        f"a Fourier transform {FIXED}",
    ),
    KnownMixer("autocorrelation", r"AutoCorrelation$|AutoformerAttention$", "it weighs time delays, not keys"),
    KnownMixer("hashed attention", r"^LSH(Self)?Attention$", "its queries see the keys of their hash bucket"),
    KnownMixer("low-rank attention", r"Nystrom\w*Attention$", "its weights are a product of three low-rank factors"),
    KnownMixer(
        "token-mixing MLP",
        r"^(MixerBlock|ResBlock|SpatialGatingBlock)$",
        f"an MLP over positions {FIXED}",
        r"^timm\.models\.mlp_mixer$",
    ),
    KnownMixer("gated convolution", r"^Lfm2\w*ShortConv$|^InklingShortConvolution$", f"a gated convolution {FIXED}"),
)
# Classes that carry the name of a mixer and only stand around it.
AROUND = re.compile(r"Norm|MLP|FeedForward|Embedding|((En|De)coder|(En|De)coderLayer|Model|Head|Stack|Cache)$|For[A-Z]")


@cache
def known_mixer(kind: type) -> KnownMixer | None:
    """Return the row of the table that holds a class of modules or one of its bases; None if there is none.

    >>> known_mixer(type("MambaMixer", (nn.Module,), {})).kind
    'state space'
    """
    for base in kind.__mro__:
        if base in nn.Module.__mro__ or AROUND.search(base.__name__):
            continue
        for known in KNOWN:
            if re.search(known.name, base.__name__) and re.search(known.file, base.__module__):
                return known
    return None

"""Libraries for tables, series, recommendation and graphs, and collections of small models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import Case


def words(b: int = 2, n: int = 9, dim: int = 32) -> torch.Tensor:
    return torch.randn(b, n, dim)


def rtdl() -> Iterator[Case]:
    from rtdl_revisiting_models import FTTransformer

    given: dict[str, Any] = FTTransformer.get_default_kwargs(n_blocks=2)
    given |= {"d_block": 32, "attention_n_heads": 4}
    for key in ("linformer_kv_compression_ratio",):
        given.pop(key, None)
    columns = lambda: (torch.randn(4, 3), torch.stack([torch.randint(0, n, (4,)) for n in (3, 4)], 1))  # noqa: E731
    sizes = {"n_cont_features": 3, "cat_cardinalities": [3, 4], "d_out": 1}
    yield Case(name="FTTransformer", build=partial(FTTransformer, **sizes, **given), inputs=columns)
    yield Case(
        name="FTTransformer, fewer keys",
        build=partial(
            FTTransformer,
            **sizes,
            **given,
            linformer_kv_compression_ratio=0.5,
            linformer_kv_compression_sharing="headwise",
        ),
        inputs=columns,
    )


def neuralforecast() -> Iterator[Case]:
    from neuralforecast.common._modules import AttentionLayer, FullAttention
    from neuralforecast.models.autoformer import AutoCorrelation, AutoCorrelationLayer
    from neuralforecast.models.informer import ProbAttention
    from neuralforecast.models.tft import InterpretableMultiHeadAttention

    for b in (3, 4):
        yield Case(
            name=f"FullAttention, batch {b}",
            build=lambda: AttentionLayer(FullAttention(mask_flag=False, attention_dropout=0.0), 32, 4),
            inputs=lambda b=b: (words(b),),
            call=lambda model, x: model(x, x, x, attn_mask=None)[0],
        )
    yield Case(
        name="ProbAttention",
        build=lambda: AttentionLayer(ProbAttention(mask_flag=False, factor=1, attention_dropout=0.0), 32, 4),
        inputs=lambda: (words(2, 16),),
        call=lambda model, x: model(x, x, x, attn_mask=None)[0],
        batched=False,
    )
    yield Case(
        name="AutoCorrelation",
        build=lambda: AutoCorrelationLayer(AutoCorrelation(mask_flag=False, factor=1, attention_dropout=0.0), 32, 4),
        inputs=lambda: (words(2, 16),),
        call=lambda model, x: model(x, x, x, attn_mask=None)[0],
    )
    for b in (3, 8):
        yield Case(
            name=f"InterpretableMultiHeadAttention, batch {b}",
            build=partial(
                InterpretableMultiHeadAttention,
                n_head=4,
                hidden_size=32,
                example_length=9,
                attn_dropout=0.0,
                dropout=0.0,
            ),
            inputs=lambda b=b: (words(b),),
        )


def pytorch_forecasting() -> Iterator[Case]:
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import InterpretableMultiHeadAttention

    for b in (2, 4, 6, 8):
        yield Case(
            name=f"InterpretableMultiHeadAttention, batch {b}",
            build=partial(InterpretableMultiHeadAttention, n_head=4, d_model=32, dropout=0.0),
            inputs=lambda b=b: (words(b),),
            call=lambda model, x: model(x, x, x)[0],
        )


def darts() -> Iterator[Case]:
    from darts.models.components.tft_submodels import _InterpretableMultiHeadAttention

    for b in (6, 8):
        yield Case(
            name=f"InterpretableMultiHeadAttention, batch {b}",
            build=partial(_InterpretableMultiHeadAttention, n_head=4, d_model=32, dropout=0.0),
            inputs=lambda b=b: (words(b),),
            call=lambda model, x: model(x, x, x)[0],
        )


def recbole() -> Iterator[Case]:
    from recbole.model.layers import (
        FeedForward,
        MultiHeadAttention,
        SequenceAttLayer,
        TransformerEncoder,
    )

    assert FeedForward.__name__
    mask = torch.full((9, 9), -10000.0).triu(1)[None, None]
    sizes = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "layer_norm_eps": 1e-12}
    yield Case(
        name="MultiHeadAttention",
        build=partial(MultiHeadAttention, 4, 32, **sizes),
        inputs=lambda: (words(),),
        call=lambda model, x: model(x, mask),
    )
    yield Case(
        name="TransformerEncoder",
        build=partial(TransformerEncoder, n_layers=2, n_heads=4, hidden_size=32, inner_size=32, **sizes),
        inputs=lambda: (words(),),
        call=lambda model, x: model(x, mask, output_all_encoded_layers=True),
    )
    yield Case(
        name="SequenceAttLayer",
        build=partial(SequenceAttLayer, torch.arange(9)[None], att_hidden_size=(128, 16), return_seq_weight=False),
        inputs=lambda: (words(2, 1)[:, 0], words(), torch.tensor([9, 6])),
        batched=False,
        sharper=(1.0,),
    )


def deepctr() -> Iterator[Case]:
    from deepctr_torch.layers import AFMLayer, InteractingLayer
    from deepctr_torch.layers.sequence import AttentionSequencePoolingLayer

    for b in (3, 2, 4):
        yield Case(
            name=f"AutoInt InteractingLayer, batch {b}",
            build=partial(InteractingLayer, 32, head_num=2),
            inputs=lambda b=b: (words(b, 6),),
        )
    for name, given in {"scaled": {"scaling": True}, "no residual": {"use_res": False}}.items():
        yield Case(
            name=f"AutoInt InteractingLayer, {name}",
            build=partial(InteractingLayer, 32, head_num=2, **given),
            inputs=lambda: (words(3, 6),),
        )
    yield Case(
        name="AFMLayer",
        build=partial(AFMLayer, 8, 4),
        inputs=lambda: (torch.randn(3, 6, 8),),
        call=lambda model, x: model(list(x.split(1, 1))),
    )
    yield Case(
        name="DIN AttentionSequencePoolingLayer",
        build=partial(
            AttentionSequencePoolingLayer, embedding_dim=8, att_hidden_units=(16, 4), weight_normalization=True
        ),
        inputs=lambda: (torch.randn(2, 1, 8), torch.randn(2, 9, 8), torch.tensor([[9], [6]])),
    )


def torch_geometric() -> Iterator[Case]:
    from torch_geometric.nn import (
        AGNNConv,
        GATConv,
        GATv2Conv,
        GPSConv,
        RGATConv,
        SAGEConv,
        SetTransformerAggregation,
        SuperGATConv,
        TransformerConv,
    )
    from torch_geometric.nn.aggr import AttentionalAggregation, GraphMultisetTransformer

    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 3], [1, 2, 3, 4, 0, 6, 7, 8, 5, 3, 0]])
    texts = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    nodes = lambda: (torch.randn(9, 32),)  # noqa: E731
    reports = {"return_attention_weights": True}
    kinds = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1])  # of the edges
    for kind in (GATConv, GATv2Conv, TransformerConv):
        yield Case(
            name=kind.__name__,
            build=partial(kind, 32, 8, heads=4),
            inputs=nodes,
            call=lambda model, x: model(x, edges),
            batched=False,
            edge_weights=lambda model, x: model(x, edges, **reports)[1],
        )
    for kind, given in ((SuperGATConv, (32, 8, 4)), (AGNNConv, ())):
        yield Case(
            name=kind.__name__,
            build=partial(kind, *given),
            inputs=nodes,
            call=lambda model, x: model(x, edges),
            batched=False,
        )
    for mod in (None, "additive", "f-scaled"):
        yield Case(
            name="RGATConv" if mod is None else f"RGATConv, {mod}",
            build=partial(RGATConv, 32, 8, num_relations=3, heads=4, mod=mod),
            inputs=nodes,
            call=lambda model, x: model(x, edges, kinds),
            batched=False,
            edge_weights=(lambda model, x: model(x, edges, kinds, **reports)[1]) if mod is None else None,
        )
    yield Case(
        name="GPSConv",
        build=lambda: GPSConv(32, SAGEConv(32, 32), heads=4, dropout=0.0),
        inputs=nodes,
        call=lambda model, x: model(x, edges, texts),
        batched=False,
    )
    yield Case(
        name="GPSConv over GATConv",
        build=lambda: GPSConv(32, GATConv(32, 8, heads=4), heads=4, dropout=0.0),
        inputs=nodes,
        call=lambda model, x: model(x, edges, texts),
        batched=False,
    )
    yield Case(
        name="GPSConv, Performer",
        build=lambda: GPSConv(32, SAGEConv(32, 32), heads=4, dropout=0.0, attn_type="performer"),
        inputs=nodes,
        call=lambda model, x: model(x, edges, texts),
        batched=False,
    )
    yield Case(
        name="SetTransformerAggregation",
        build=lambda: SetTransformerAggregation(32, num_seed_points=2, heads=4),
        inputs=nodes,
        call=lambda model, x: model(x, texts),
        batched=False,
    )
    yield Case(
        name="GraphMultisetTransformer",
        build=lambda: GraphMultisetTransformer(32, k=3, heads=4),
        inputs=nodes,
        call=lambda model, x: model(x, texts),
        batched=False,
    )
    yield Case(
        name="AttentionalAggregation",
        build=lambda: AttentionalAggregation(nn.Linear(32, 1)),
        inputs=nodes,
        call=lambda model, x: model(x, texts),
        batched=False,
    )


def labml() -> Iterator[Case]:
    from labml_nn.diffusion.stable_diffusion.model.unet_attention import CrossAttention as Diffusion
    from labml_nn.graphs.gat import GraphAttentionLayer
    from labml_nn.graphs.gatv2 import GraphAttentionV2Layer
    from labml_nn.transformers.alibi import AlibiMultiHeadAttention
    from labml_nn.transformers.feedback import FeedbackAttention
    from labml_nn.transformers.mha import MultiHeadAttention
    from labml_nn.transformers.retro.model import CrossAttention
    from labml_nn.transformers.rope import RotaryPEMultiHeadAttention
    from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention

    first = lambda: (words(9, 2),)  # noqa: E731  (the sequence is dim 0)
    itself = lambda model, x: model(query=x, key=x, value=x)  # noqa: E731
    causal = torch.ones(9, 9, 1).tril().bool()
    for name, build in {
        "MultiHeadAttention": partial(MultiHeadAttention, 4, 32, 0.0),
        "RelativeMultiHeadAttention": partial(RelativeMultiHeadAttention, 4, 32, 0.0),
        "RotaryPEMultiHeadAttention": partial(RotaryPEMultiHeadAttention, 4, 32, 0.5, 0.0),
    }.items():
        yield Case(name=name, build=build, inputs=first, call=itself, batched=False)
    for name, build in {
        "MultiHeadAttention, causal": partial(MultiHeadAttention, 4, 32, 0.0),
        "AlibiMultiHeadAttention": partial(AlibiMultiHeadAttention, 4, 32, 0.0),
    }.items():
        yield Case(
            name=name,
            build=build,
            inputs=first,
            call=lambda model, x: model(query=x, key=x, value=x, mask=causal),
            batched=False,
        )
    yield Case(
        name="FeedbackAttention",
        build=partial(FeedbackAttention, 4, 32, 0.0),
        inputs=lambda: (words(2, 1)[:, 0], words(9, 2)),
        call=lambda model, q, memory: model(query=q, key=memory, value=memory),
        batched=False,
    )
    for flash in (False, True):
        yield Case(
            name=f"stable diffusion CrossAttention{', flash' * flash}",
            build=partial(diffusion, Diffusion, flash),
            inputs=lambda: (words(2, 9), words(2, 5, 24)),
        )
    adjacent = (torch.rand(9, 9, 1, generator=torch.Generator().manual_seed(0)) > 0.4) | torch.eye(9).bool()[..., None]
    for kind in (GraphAttentionLayer, GraphAttentionV2Layer):
        yield Case(
            name=kind.__name__,
            build=partial(kind, 32, 32, 4, dropout=0.0),
            inputs=lambda: (torch.randn(9, 32),),
            call=lambda model, x: model(x, adjacent),
            batched=False,
        )
    yield Case(
        name="RETRO CrossAttention",
        build=partial(CrossAttention, 32, 4, 8),
        inputs=lambda: (torch.randn(2, 3, 2, 8, 32), torch.randn(2, 3, 8, 32)),
    )


def diffusion(kind: Any, flash: bool) -> nn.Module:
    layer = kind(32, 24, 4, 8)
    layer.use_flash_attention = flash
    layer.flash = None
    return layer


def d2l() -> Iterator[Case]:
    from d2l.torch import AdditiveAttention, DotProductAttention, MultiHeadAttention, TransformerEncoder

    lengths = torch.tensor([7, 4])
    yield Case(
        name="DotProductAttention",
        build=partial(DotProductAttention, 0.0),
        inputs=lambda: (words(2, 5), words(2, 7)),
        call=lambda model, q, k: model(q, k, k, lengths),
    )
    yield Case(
        name="AdditiveAttention",
        build=lambda: AdditiveAttention(16, 0.0),
        inputs=lambda: (words(2, 5), words(2, 7)),
        call=lambda model, q, k: model(q, k, k, lengths),
        sharper=(1.0,),
    )
    for b in (2, 4, 3):
        yield Case(
            name=f"MultiHeadAttention, batch {b}",
            build=lambda: MultiHeadAttention(32, 4, 0.0),
            inputs=lambda b=b: (words(b, 5), words(b, 7)),
            call=lambda model, q, k: model(q, k, k, None),
            sharper=(1.0,),
        )
    yield Case(
        name="TransformerEncoder",
        build=lambda: TransformerEncoder(50, 32, 32, 4, 2, 0.0),
        inputs=lambda: (torch.randint(0, 50, (2, 7)),),
        call=lambda model, x: model(x, lengths),
        sharper=(1.0,),
    )


def keras() -> Iterator[Case]:
    os.environ["KERAS_BACKEND"] = "torch"
    from keras import Input, Model
    from keras.layers import AdditiveAttention, Attention, Dense, GroupQueryAttention, MultiHeadAttention

    pair = lambda: (words(2, 5), words(2, 7))  # noqa: E731

    def built(layer: Any, *shapes: tuple[int, ...]) -> Any:
        layer(*(torch.zeros(shape) for shape in shapes))
        return layer

    yield Case(
        name="MultiHeadAttention",
        build=lambda: built(MultiHeadAttention(4, 8), (2, 5, 32), (2, 7, 32)),
        inputs=pair,
    )
    yield Case(
        name="MultiHeadAttention, causal",
        build=lambda: built(MultiHeadAttention(4, 8), (2, 9, 32), (2, 9, 32)),
        inputs=lambda: (words(), words()),
        call=lambda model, q, k: model(q, k, use_causal_mask=True),
    )
    yield Case(
        name="MultiHeadAttention, scores returned",
        build=lambda: built(MultiHeadAttention(4, 8), (2, 5, 32), (2, 7, 32)),
        inputs=pair,
        call=lambda model, q, k: model(q, k, return_attention_scores=True)[0],
    )
    yield Case(
        name="GroupQueryAttention",
        build=lambda: built(GroupQueryAttention(8, 4, 2), (2, 5, 32), (2, 7, 32)),
        inputs=pair,
    )
    for kind in (Attention, AdditiveAttention):
        yield Case(
            name=kind.__name__,
            build=lambda kind=kind: kind(),
            inputs=pair,
            call=lambda model, q, k: model([q, k]),
        )

    def functional() -> nn.Module:
        x = Input((9, 32))
        y = MultiHeadAttention(4, 8)(x, x)
        return Model(x, Dense(3)(MultiHeadAttention(2, 8)(y, y)))

    yield Case(name="functional model", build=functional, inputs=lambda: (words(),))


LIBRARIES = {
    "rtdl_revisiting_models": rtdl,
    "neuralforecast": neuralforecast,
    "pytorch-forecasting": pytorch_forecasting,
    "darts": darts,
    "recbole": recbole,
    "deepctr-torch": deepctr,
    "torch_geometric": torch_geometric,
    "labml-nn": labml,
    "d2l": d2l,
    "keras": keras,
}

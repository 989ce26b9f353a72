"""Forms of attention that are on the tape."""

from __future__ import annotations

import copy
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
import tests.lens.eager.deformable_layers as deformable
import tests.lens.graph_layers as graphs
from tests.lens.fake_kernels import Opaque
from tests.lens.unseen_layers import script

from .form import (
    CHANGED,
    DIM,
    EDGES,
    SAMPLES,
    SCORES,
    SEEN,
    TERMS,
    WEIGHTS,
    B,
    D,
    Example,
    Form,
    H,
    N,
    by,
    softmax_of_dots,
)

LATER = torch.ones(N, N, dtype=torch.bool).triu(1)
DISTANCE = (torch.arange(N) - torch.arange(N)[:, None]).abs().float()
GATE = torch.linspace(0.2, 0.9, H).view(H, 1, 1)
MIX = torch.eye(H) + 0.3
FIXED = torch.randn(B, H, N, N, generator=torch.Generator().manual_seed(5))
SCALE = D**-0.5


def causal(q, k):
    return (q @ k.mT * SCALE).masked_fill(LATER, -torch.inf).softmax(-1)


def near(q, k):
    return (q @ k.mT * SCALE - DISTANCE).softmax(-1)


def shared_keys(q, k):
    return softmax_of_dots(q, k[:, :1])


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def multi_head():
    """nn.MultiheadAttention, inside an encoder layer or not."""
    x = torch.randn(B, N, DIM)
    layer = nn.TransformerEncoderLayer(DIM, H, batch_first=True).eval()
    exact = copy.deepcopy(layer.self_attn).double()
    truth = lambda: [exact(*[x.double()] * 3, average_attn_weights=False)[1].detach()]  # noqa: E731
    return Example(model=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), inputs=[x], truth=truth)


def flex(function):
    def attend(q, k, v):
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, N, N, device="cpu")
        return function(q, k, v, block_mask=mask)

    return attend


def flex_near(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs())


def recorded_weights(q, k, v):
    return regard.weights(q, k, mask=regard.Causal()) @ v


def compiled(build):
    """Return the builder of a compiled model."""

    def compile_whole():
        example = build()
        return Example(model=torch.compile(example.model, backend="eager"), inputs=example.inputs, truth=example.truth)

    return compile_whole


def compiled_part(build):
    """Return the builder of a model with a compiled part."""

    def compile_part():
        example = build()
        example.model.compile(backend="eager")
        return Example(model=nn.Sequential(example.model), inputs=example.inputs, truth=example.truth)

    return compile_part


def our_layer():
    layer, x = regard.nn.Attention(DIM, heads=H, mask=regard.Causal()), torch.randn(B, N, DIM)
    exact = copy.deepcopy(layer).double()
    return Example(model=layer, inputs=[x], truth=lambda: [exact.weights(x.double()).dense().detach()])


def of_library(module, name, weights=softmax_of_dots, **given):
    """A call of a function of a library that takes b i h d."""

    def build():
        function = getattr(sys.modules[module], name)

        def attend(q, k, v):
            out = function(*(x.transpose(1, 2) for x in (q, k, v)), **given)
            return (out if isinstance(out, torch.Tensor) else out[0]).transpose(1, 2)

        return by(attend, weights)()

    return build


def own_kernel(q, k, v):
    return Opaque.apply(q, k, v)


def of_transformers(implementation, build="llama"):
    def example():
        import tests.lens.tiny_transformers as zoo

        model = zoo.made(getattr(zoo, build), implementation)
        exact = copy.deepcopy(model).double()
        exact.set_attn_implementation("eager")
        truth = lambda: [A.detach() for A in exact(zoo.ids(), output_attentions=True).attentions]  # noqa: E731
        return Example(model=model, inputs=[zoo.ids()], truth=truth)

    return example


def top2(module, q, k, v, mask, scaling, **given):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scaling
    s = s if mask is None else s + mask
    A = s.masked_fill(s < s.topk(2, -1).values[..., -1:], -1e30).softmax(-1)
    module.used = A.detach().double()
    return (A @ v).transpose(1, 2), A


def registered_function():
    """A function of the user behind the attention interface of transformers, and the weights that it used."""
    import transformers
    from transformers.masking_utils import eager_mask

    import tests.lens.tiny_transformers as zoo

    transformers.AttentionInterface.register("top2", top2)
    transformers.AttentionMaskInterface.register("top2", eager_mask)
    model = zoo.made(zoo.llama, "eager")
    model.set_attn_implementation("top2")
    return Example(
        model=model,
        inputs=[zoo.ids()],
        truth=lambda: [module.used for module in model.modules() if hasattr(module, "used")],
    )


def exp_over_sum(q, k, v):
    e = (q @ k.mT * SCALE).exp()
    return e / e.sum(-1, keepdim=True) @ v


def log_sum_exp(q, k, v):
    s = q @ k.mT * SCALE
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


def plus_one(q, k, v):
    e = (q @ k.mT * SCALE).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


def sink_of_zero(q, k):
    return F.pad(q @ k.mT * SCALE, (0, 1)).softmax(-1)[..., :-1]


def additive(q, k):
    return (q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1)


def distances(q, k):
    return (-(q[:, :, :, None] - k[:, :, None]).square().sum(-1).sqrt()).softmax(-1)


def mixed_before(q, k):
    return torch.einsum("hg,bgij->bhij", MIX.to(q), q @ k.mT * SCALE).softmax(-1)


def biased(q, k):
    return (q @ k.mT * SCALE + FIXED.to(q)).softmax(-1)


def capped(q, k):
    return (2 * (q @ k.mT * SCALE / 2).tanh()).softmax(-1)


def loop_over_heads(q, k, v):
    return torch.stack([softmax_of_dots(q[:, h], k[:, h]) @ v[:, h] for h in range(H)], 1)


def folded(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm((torch.bmm(q, k.mT) * SCALE).softmax(-1), v).unflatten(0, (B, H))


def chunks_of_queries(q, k, v):
    return torch.cat([softmax_of_dots(part, k) @ v for part in q.split(4, 2)], 2)


def parts_of_queries(q, k):
    return [*softmax_of_dots(q, k).split(4, 2)]


@script
def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.matmul((torch.matmul(q, k.transpose(-2, -1)) * 0.5).softmax(-1), v)


def mapped(q, k, v):
    return torch.vmap(lambda q, k, v: softmax_of_dots(q, k) @ v)(q, k, v)


def gated(q, k):
    return softmax_of_dots(q, k) * GATE


def masked_after(q, k):
    A = softmax_of_dots(q, k) * ~LATER
    return A / A.sum(-1, keepdim=True)


def talking_heads(q, k):
    return torch.einsum("hg,bgij->bhij", MIX.to(q), softmax_of_dots(q, k))


def difference(q, k):
    return softmax_of_dots(q, k) - 0.5 * softmax_of_dots(k, q)


def slots(q, k):
    A = (q @ k.mT * SCALE).softmax(-2) + 1e-8
    return A / A.sum(-1, keepdim=True)


def with_epsilon(q, k):
    A = softmax_of_dots(q, k) + 0.02
    return A / A.sum(-1, keepdim=True)


def mean_of_heads(q, k):
    return softmax_of_dots(q, k).mean(1, keepdim=True)


def edges_of(build, *inputs):
    """A layer of a graph library, and its weights as a matrix; parallel edges are added."""

    def example():
        layer = build()

        def truth():
            A = torch.zeros(graphs.NODES, graphs.NODES, graphs.HEADS, dtype=torch.float64)
            sources, targets = graphs.EDGES
            found = layer.weights.double().flatten(1)
            return [A.index_put((targets, sources), found, accumulate=True).permute(2, 0, 1)]

        return Example(model=layer, inputs=inputs, truth=truth)

    return example


def gated_edges(A):
    return A * torch.linspace(0.1, 1, len(A))[:, None]


def written(weights):
    """Weights by a function, times the values."""
    return by(lambda q, k, v: weights(q, k) @ v, weights)


def summed(q, k, v):
    return (softmax_of_dots(q, k)[..., None] * v[:, :, None]).sum(-2)


def einsum(q, k, v):
    A = torch.einsum("bhid,bhjd->bhij", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", A, v)


def sampled_points(way):
    """A deformable attention, and its weights over the cells: what it reads of one-hot maps."""

    def example():
        layer = deformable.Deformable(way)

        def truth():
            places, A = (x.double() for x in layer.kept)
            cells = torch.eye(deformable.CELLS, dtype=torch.float64).expand(len(A), deformable.HEADS, -1, -1)
            read = deformable.sampled(layer, cells.transpose(1, 2), places)  # (b h) cell i p
            weights = torch.cat(read, -1).mul(deformable.folded(A)).sum(-1)
            return [weights.mT.unflatten(0, (-1, deformable.HEADS))]

        return Example(model=layer, inputs=deformable.texts(dtype=torch.float32), truth=truth)

    return example


NODE_FEATURES = torch.randn(graphs.NODES, graphs.WIDTH, generator=torch.Generator().manual_seed(7))
TORCH = "attention of PyTorch and `regard`"
COMPILED = "models under `torch.compile`"
LIBRARIES = "`flash_attn`, xformers, registered kernels"
TRANSFORMERS = "the attention interface of transformers"
BY_HAND = "`softmax(q @ k.mT) @ v` written out, in many variants"
POINTS = "deformable attention by `F.grid_sample`"
GRAPHS = "the edge softmax of torch_geometric and dgl"
AFTER = "gates, masks and mixed heads after the softmax"
OWN = "functions of your own in the attention interface of transformers"
SDPA = F.scaled_dot_product_attention
FORMS = (
    Form(
        name="`F.scaled_dot_product_attention`: masks, ALiBi, grouped heads",
        family=TORCH,
        outcome=SEEN,
        shown=TERMS,
        examples=[
            by(SDPA),
            by(lambda q, k, v: SDPA(q, k, v, is_causal=True), causal),
            by(lambda q, k, v: SDPA(q, k, v, attn_mask=~LATER), causal),
            by(lambda q, k, v: SDPA(q, k, v, attn_mask=-DISTANCE), near),
            by(grouped, shared_keys),
        ],
    ),
    Form(
        name="`nn.MultiheadAttention`, `nn.TransformerEncoder`",
        family=TORCH,
        outcome=SEEN,
        shown=TERMS,
        examples=[multi_head],
    ),
    Form(
        name="`flex_attention`, compiled or not: `mask_mod`, ALiBi",
        family=TORCH,
        outcome=SEEN,
        shown=TERMS,
        examples=[
            by(flex(flex_attention), causal),
            by(flex(torch.compile(flex_attention, backend="eager")), causal),
            by(flex_near, near),
        ],
    ),
    Form(
        name="`regard.attend`, layers of `regard.nn`",
        family=TORCH,
        outcome=SEEN,
        shown=TERMS,
        examples=[by(lambda q, k, v: regard.attend(q, k, v, mask=regard.Causal()), causal), our_layer],
    ),
    Form(
        name="a compiled model, or a model with compiled blocks",
        family=COMPILED,
        outcome=SEEN,
        shown=TERMS,
        examples=[compiled(by(SDPA)), compiled_part(by(lambda q, k, v: softmax_of_dots(q, k) @ v))],
    ),
    *(
        Form(name=name, family=LIBRARIES, outcome=SEEN, shown=TERMS, library=library, examples=examples)
        for name, library, examples in (
            (
                "`flash_attn` 2",
                "flash",
                [
                    of_library("flash_attn", "flash_attn_func"),
                    of_library("flash_attn", "flash_attn_func", causal, causal=True),
                ],
            ),
            ("`flash_attn` 3", "third", [of_library("flash_attn_interface", "flash_attn_func", causal, causal=True)]),
            ("`flash_attn` 4", "cute", [of_library("flash_attn.cute", "flash_attn_func", causal, causal=True)]),
            (
                "`memory_efficient_attention` of xformers",
                "xformers",
                [of_library("xformers.ops", "memory_efficient_attention")],
            ),
        )
    ),
    Form(
        name="functions given to `register_kernel`",
        family=LIBRARIES,
        outcome=SEEN,
        shown=TERMS,
        library="registered_kernels",
        examples=[by(lambda q, k, v: own_kernel(q, k, v))],
    ),
    Form(
        name="the attention interface of transformers: `sdpa`, `eager`",
        family=TRANSFORMERS,
        outcome=SEEN,
        shown=TERMS,
        examples=[of_transformers("sdpa"), of_transformers("eager"), of_transformers("sdpa", "bert")],
    ),
    Form(
        name="a function registered in this interface that returns weights of its own",
        family=OWN,
        outcome=CHANGED,
        shown=SCORES,
        library="registries",
        examples=[registered_function],
    ),
    Form(
        name="`softmax(q @ k.mT * scale + mask) @ v` by `matmul`, `bmm`, `einsum` or a weighted sum",
        family=BY_HAND,
        outcome=SEEN,
        shown=TERMS,
        examples=[written(causal), written(near), by(folded), by(einsum), by(summed)],
    ),
    Form(
        name="a softmax by `exp` and sums, `log_softmax` or `logsumexp`",
        family=BY_HAND,
        outcome=SEEN,
        shown=TERMS,
        examples=[
            by(exp_over_sum),
            by(lambda q, k, v: F.log_softmax(q @ k.mT * SCALE, -1).exp() @ v),
            by(log_sum_exp),
        ],
    ),
    Form(
        name="softmax plus one, sigmoid, ReLU and squared ReLU instead of a softmax",
        family=BY_HAND,
        outcome=SEEN,
        shown=TERMS,
        examples=[
            by(plus_one, sink_of_zero),
            written(lambda q, k: (q @ k.mT * SCALE).sigmoid()),
            written(lambda q, k: (q @ k.mT * SCALE).relu() / N),
            written(lambda q, k: (q @ k.mT * SCALE).relu().square() / N),
        ],
    ),
    Form(
        name="other scores: additive, distances, a cap, heads mixed before the softmax, numbers of no structure",
        family=BY_HAND,
        outcome=SEEN,
        shown=SCORES,
        examples=[written(additive), written(distances), written(capped), written(mixed_before), written(biased)],
    ),
    Form(
        name="a loop over heads: an entry per head; chunks of queries: an entry per chunk",
        family=BY_HAND,
        outcome=SEEN,
        shown=TERMS,
        examples=[
            by(loop_over_heads, lambda q, k: [*softmax_of_dots(q, k).split(1, 1)]),
            by(chunks_of_queries, parts_of_queries),
        ],
    ),
    Form(
        name="a function of `torch.jit.script`; inside `torch.vmap`",
        family=BY_HAND,
        outcome=SEEN,
        shown=TERMS,
        examples=[by(scripted), by(mapped)],
    ),
    Form(
        name="the edge softmax of torch_geometric and dgl",
        family=GRAPHS,
        outcome=SEEN,
        shown=EDGES,
        library="graph_libraries",
        examples=[
            edges_of(graphs.GATConv, NODE_FEATURES, graphs.EDGES),
            edges_of(graphs.DglLayer, graphs.Graph(graphs.EDGES), NODE_FEATURES),
        ],
    ),
    Form(
        name="deformable attention by `F.grid_sample`: Deformable DETR, RT-DETR, Mask2Former, mmcv",
        family=POINTS,
        outcome=SEEN,
        shown=SAMPLES,
        examples=[sampled_points(way) for way in (deformable.stacked, deformable.concatenated, deformable.einsum)],
    ),
    Form(
        name="gates of edges after the edge softmax of torch_geometric",
        family=AFTER,
        outcome=CHANGED,
        shown=EDGES,
        library="graph_libraries",
        examples=[edges_of(partial(graphs.GATConv, change=gated_edges), NODE_FEATURES, graphs.EDGES)],
    ),
    Form(
        name="gates of heads, queries or keys; a mask after the softmax",
        family=AFTER,
        outcome=CHANGED,
        shown=TERMS,
        examples=[written(gated), written(masked_after)],
    ),
    Form(
        name="heads mixed after the softmax, differential attention, slot attention, an epsilon, a mean over heads",
        family=AFTER,
        outcome=CHANGED,
        shown=WEIGHTS,
        examples=[
            written(talking_heads),
            written(difference),
            written(slots),
            written(with_epsilon),
            by(lambda q, k, v: (mean_of_heads(q, k) @ v[:, :1]).expand(B, H, N, D), mean_of_heads),
        ],
    ),
)

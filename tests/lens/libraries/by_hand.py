"""Ways to write attention out by hand: one function from q, k, v (b h n d) to the output of the heads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case

HEADS, DIM = 2, 16
SCALE = (DIM // HEADS) ** -0.5
WAYS: dict[str, Callable[..., Tensor]] = {}


def way(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Add a way to the list, by the name of its function."""
    WAYS[function.__name__.replace("_", " ")] = function
    return function


class Attends(nn.Module):
    """Linear maps to q, k, v in heads, one way to attend, heads joined."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class Mixed(nn.Module):
    """A way to attend, and a fused attention that every capture sees: nothing of the first may be missed in silence."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = Attends(attend), Attends(F.scaled_dot_product_attention)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x))


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@way
def softmax_of_matmul(q, k, v):
    return (q @ k.mT * SCALE).softmax(-1) @ v


@way
def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@way
def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@way
def einsum_bhid_bhjd(q, k, v):
    A = torch.einsum("bhid,bhjd->bhij", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", A, v)


@way
def einsum_ijbh(q, k, v):
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    A = torch.einsum("ibhd,jbhd->ijbh", q, k).mul(SCALE).softmax(1)
    return torch.einsum("ijbh,jbhd->ibhd", A, v).permute(1, 2, 0, 3)


@way
def einsum_with_ellipsis(q, k, v):
    A = torch.einsum("...id,...jd->...ij", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("...ij,...jd->...id", A, v)


@way
def einsum_of_folded_heads(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    A = (torch.einsum("zid,zjd->zij", q, k) * SCALE).softmax(-1)
    return torch.einsum("zjd,zij->zid", v, A).unflatten(0, (-1, HEADS))


@way
def einsum_of_three(q, k, v):
    A = (q @ k.mT * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd,de->bhie", A, v, torch.eye(v.shape[-1]))


@way
def keys_first(q, k, v):
    A = (k @ q.mT * SCALE).softmax(-2)
    return (v.mT @ A).mT


@way
def heads_before_batch(q, k, v):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return ((q @ k.mT * SCALE).softmax(-1) @ v).transpose(0, 1)


@way
def folded_batch_and_heads(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm((torch.bmm(q, k.mT) * SCALE).softmax(-1), v).unflatten(0, (-1, HEADS))


@way
def folded_heads_and_batch(q, k, v):
    b = q.shape[0]
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    return torch.bmm((torch.bmm(q, k.mT) * SCALE).softmax(-1), v).unflatten(0, (-1, b)).transpose(0, 1)


@way
def baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.baddbmm(torch.zeros(len(q), q.shape[1], k.shape[1]), q, k.mT, beta=0, alpha=SCALE)
    return torch.bmm(s.float().softmax(-1), v).unflatten(0, (-1, HEADS))


@way
def matmul_out(q, k, v):
    s = torch.empty(*q.shape[:3], k.shape[2])
    torch.matmul(q, k.mT, out=s)
    s *= SCALE
    return s.softmax(-1) @ v


@way
def scores_changed_in_place(q, k, v):
    s = q @ k.mT
    s /= SCALE**-1
    s += torch.full((q.shape[2],) * 2, -1e9).triu(1)
    s.sub_(0.5)
    return s.softmax(-1) @ v


@way
def elementwise_scores(q, k, v):
    return ((q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * SCALE).softmax(-1) @ v


@way
def elementwise_values(q, k, v):
    return ((q @ k.mT * SCALE).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


@way
def distances(q, k, v):
    return (-(torch.cdist(q, k) ** 2) * SCALE).softmax(-1) @ v


@way
def tensordot(q, k, v):
    out = [[weigh_by_tensordot(q[b, h], k[b, h], v[b, h]) for h in range(HEADS)] for b in range(len(q))]
    return torch.stack([torch.stack(heads) for heads in out])


def weigh_by_tensordot(q, k, v):
    A = (torch.tensordot(q, k, dims=([1], [1])) * SCALE).softmax(-1)
    return torch.tensordot(A, v, dims=1)


@way
def linear_function(q, k, v):
    out = [[weigh_by_linear(q[b, h], k[b, h], v[b, h]) for h in range(HEADS)] for b in range(len(q))]
    return torch.stack([torch.stack(heads) for heads in out])


def weigh_by_linear(q, k, v):
    return F.linear((F.linear(q, k) * SCALE).softmax(-1), v.T)


@way
def special_softmax(q, k, v):
    return torch.special.softmax(q @ k.mT * SCALE, -1) @ v


@way
def softmax_module(q, k, v):
    return torch.matmul(nn.Softmax(dim=-1)(torch.matmul(q, k.permute(0, 1, 3, 2)).div(math.sqrt(8))), v)


@way
def exponential_of_log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT * SCALE, -1).exp() @ v


@way
def exponential_over_sum(q, k, v):
    s = q @ k.mT * SCALE
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@way
def exponential_less_logsumexp(q, k, v):
    s = q @ k.mT * SCALE
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v


@way
def softmax_plus_one(q, k, v):
    e = (q @ k.mT * SCALE).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


@way
def relu(q, k, v):
    return F.relu(q @ k.mT) / q.shape[2] @ v


@way
def squared_relu(q, k, v):
    return F.relu(q @ k.mT * SCALE) ** 2 @ v


@way
def sigmoid(q, k, v):
    return torch.sigmoid(q @ k.mT - math.log(q.shape[2])) @ v


@way
def largest_two(q, k, v):
    s = q @ k.mT * SCALE
    return s.masked_fill(s < s.topk(2, -1).values[..., -1:], -torch.finfo(s.dtype).max).softmax(-1) @ v


@way
def causal_by_where(q, k, v):
    s = torch.where(causal(q.shape[2]), torch.tensor(-torch.inf), q @ k.mT * SCALE)
    return s.softmax(-1) @ v


@way
def causal_by_masked_fill(q, k, v):
    return (q @ k.mT * SCALE).masked_fill(causal(q.shape[2]), -1e9).softmax(-1) @ v


@way
def soft_cap(q, k, v):
    return (5 * torch.tanh(q @ k.mT * SCALE / 5)).softmax(-1) @ v


@way
def alibi(q, k, v):
    r = torch.arange(q.shape[2])
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
    s = q @ k.mT * SCALE + slopes * (r[None, :] - r[:, None]).clamp(max=0)
    return s.masked_fill(causal(len(r)), -torch.inf).softmax(-1) @ v


@way
def relative_positions_by_skew(q, k, v):
    n = q.shape[2]
    table = torch.randn(n, q.shape[-1], generator=torch.Generator().manual_seed(3))
    p = F.pad(q @ table.T, (1, 0)).view(*q.shape[:2], n + 1, n)[:, :, 1:]
    return ((q @ k.mT + p) * SCALE).masked_fill(causal(n), -torch.inf).softmax(-1) @ v


@way
def normalized_queries_and_keys(q, k, v):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10.0).softmax(-1) @ v


@way
def softmax_in_float64(q, k, v):
    return (q @ k.mT * SCALE).double().softmax(-1).to(v.dtype) @ v


@way
def scale_on_both_sides(q, k, v):
    return F.softmax((q * SCALE**0.5) @ (k * SCALE**0.5).transpose(-1, -2), dim=-1) @ v


@way
def query_chunks(q, k, v):
    return torch.cat([(x @ k.mT * SCALE).softmax(-1) @ v for x in q.split(4, dim=2)], 2)


@way
def causal_chunks(q, k, v):
    out = []
    for i in range(0, q.shape[2], 4):
        s = q[:, :, i : i + 4] @ k[:, :, : i + 4].mT * SCALE
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(i + 1)
        out.append(s.masked_fill(hidden, -1e9).softmax(-1) @ v[:, :, : i + 4])
    return torch.cat(out, 2)


@way
def loop_over_heads(q, k, v):
    return torch.stack([(q[:, h] @ k[:, h].mT * SCALE).softmax(-1) @ v[:, h] for h in range(HEADS)], 1)


@way
def loop_over_heads_by_sdpa(q, k, v):
    return torch.stack([F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h]) for h in range(HEADS)], 1)


@way
def loop_over_texts(q, k, v):
    return torch.stack([(q[b] @ k[b].mT * SCALE).softmax(-1) @ v[b] for b in range(len(q))])


@way
def heads_written_one_by_one(q, k, v):
    A = torch.empty(*q.shape[:3], k.shape[2])
    for h in range(HEADS):
        A[:, h] = (q[:, h] @ k[:, h].mT * SCALE).softmax(-1)
    return A @ v


@way
def heads_stacked(q, k, v):
    return torch.stack([(q[:, h] @ k[:, h].mT * SCALE).softmax(-1) for h in range(HEADS)], 1) @ v


@way
def talking_heads_before(q, k, v):
    s = torch.einsum("bhij,hg->bgij", q @ k.mT * SCALE, torch.eye(HEADS) + 0.1)
    return s.softmax(-1) @ v


@way
def talking_heads_after(q, k, v):
    return torch.einsum("bhij,hg->bgij", (q @ k.mT * SCALE).softmax(-1), torch.eye(HEADS) + 0.1) @ v


@way
def masked_and_divided_again(q, k, v):
    m = (torch.arange(k.shape[2]) < k.shape[2] - 2).float()
    A = F.softmax(q @ k.mT * SCALE * m, -1) * m
    return A / (A.sum(-1, keepdim=True) + 1e-13) @ v


@way
def softmax_over_queries_divided_again(q, k, v):
    A = (q @ k.mT * SCALE).softmax(-2) + 1e-8
    return A / A.sum(-1, keepdim=True) @ v


@way
def differential(q, k, v):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return ((q1 @ k1.mT).softmax(-1) - 0.5 * (q2 @ k2.mT).softmax(-1)) @ v


@way
def mean_of_heads(q, k, v):
    return ((q @ k.mT * SCALE).softmax(-1).mean(1, keepdim=True) @ v).expand_as(v)


@way
def gate_per_query(q, k, v):
    return (q @ k.mT * SCALE).softmax(-1) * torch.sigmoid(q.mean(-1, keepdim=True)) @ v


@way
def bias_after_the_softmax(q, k, v):
    return ((q @ k.mT * SCALE).softmax(-1) + 0.01 * torch.ones(q.shape[2], k.shape[2]).tril()) @ v


@way
def zeros_where_not_a_number(q, k, v):
    A = (q @ k.mT * SCALE).masked_fill(causal(q.shape[2]), -torch.inf).softmax(-1)
    return torch.where(torch.isnan(A), torch.zeros_like(A), A) @ v


@way
def plus_epsilon(q, k, v):
    return ((q @ k.mT * SCALE).softmax(-1) + 1e-9) @ v


@way
def clamped(q, k, v):
    return (q @ k.mT * SCALE).softmax(-1).clamp(min=1e-6) @ v


@way
def detached(q, k, v):
    return (q @ k.mT * SCALE).softmax(-1).detach() @ v


@way
def divided_by_its_sum(q, k, v):
    return F.normalize((q @ k.mT * SCALE).softmax(-1), p=1, dim=-1) @ v


@way
def straight_through(q, k, v):
    A = (q @ k.mT * SCALE).softmax(-1)
    hard = F.one_hot(A.argmax(-1), A.shape[-1]).float()
    return (hard + A - A.detach()) @ v


@way
def local_window_by_unfold(q, k, v):
    k, v = (F.pad(x, (0, 0, 2, 2)).unfold(2, 5, 1) for x in (k, v))
    A = (torch.einsum("bhid,bhidw->bhiw", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhiw,bhidw->bhid", A, v)


@way
def vmapped_heads(q, k, v):
    return torch.vmap(torch.vmap(softmax_of_matmul))(q, k, v)


def scripted(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scale, -1), v)


def scripted_softmax(s: Tensor) -> Tensor:
    return torch.softmax(s, -1)


@cache
def script(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function by torch.jit.script, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


COMPILED, COMPILED_SOFTMAX = script(scripted), script(scripted_softmax)


@way
def scripted_function(q, k, v):
    return COMPILED(q, k, v, SCALE)


@way
def softmax_in_a_scripted_function(q, k, v):
    return COMPILED_SOFTMAX(q @ k.mT * SCALE) @ v


@way
def function_that_is_scripted_while_it_runs(q, k, v):
    return script(scripted)(q, k, v, SCALE)


class Product(torch.autograd.Function):
    """Attention as an autograd function of its own."""

    @staticmethod
    def forward(ctx, q, k, v):
        return (q @ k.mT * SCALE).softmax(-1) @ v

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError


@way
def autograd_function(q, k, v):
    return Product.apply(q, k, v)


@way
def linear_attention_by_softmax(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@way
def linear_attention_by_elu(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return torch.einsum("bhid,bhde,bhi->bhie", q, k.mT @ v, 1 / (q @ k.sum(2).unsqueeze(-1)).squeeze(-1))


@way
def mixture_of_four_experts(q, k, v):
    gates = (v @ torch.linspace(-1, 1, 32).view(8, 4)).softmax(-1)
    experts = torch.stack([v * (n + 1) for n in range(4)], 3)
    return torch.einsum("bhne,bhned->bhnd", gates, experts)


# Ways that are no attention of queries over keys: no entry of a tape may be one.
NO_ATTENTION = {"linear attention by softmax", "linear attention by elu", "mixture of four experts"}
FOLDED = ("loop over heads", "folded", "heads before batch", "vmapped", "sdpa", "softmax of matmul", "einsum of folded")


def ways_by_hand() -> Iterator[Case]:
    for name, function in WAYS.items():
        excused = name in NO_ATTENTION
        batches = (2, 3, 4) if name.startswith(FOLDED) else (3,)
        for b in batches:
            yield Case(
                name=f"{name}{f', batch {b}' if len(batches) > 1 else ''}",
                build=lambda function=function: Attends(function),
                inputs=lambda b=b: (torch.randn(b, 9, DIM),),
                no_entry=("",) if excused else (),
            )
        yield Case(
            name=f"{name}, beside SDPA",
            build=lambda function=function: Mixed(function),
            inputs=lambda: (torch.randn(3, 9, DIM),),
            no_entry=("first",) if excused else (),
            attends=("first", "second"),
            audit=name == "linear attention by elu",
        )


LIBRARIES = {"by hand": ways_by_hand}

"""Where the dims of tensors come from is followed through the functions of PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.lens.eager import dim_origins
from regard.lens.eager.dim_origins import (
    FEATURES,
    LEARNED,
    PRESUMED,
    REPEATED,
    ROWS,
    STACKED,
    UNKNOWN,
    DimOrigins,
    Factor,
    dim_order,
    is_parameter,
    join_dims,
    kinds_of,
    resize_dims,
)

B, N, H, D = 2, 5, 3, 4
DIM = H * D
WEIGHT, KERNEL = nn.Parameter(torch.randn(DIM, DIM)), nn.Parameter(torch.randn(DIM, DIM, 1))
BUFFER = torch.randn(N, 2)


class Follow(TorchFunctionMode):
    """Follows all functions that are called in a block."""

    def __init__(self):
        super().__init__()
        self.origins = DimOrigins(lambda x: x is BUFFER)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.origins.follow(func, args, kwargs or {}, out)
        return out


def origins_of(function, *args):
    with Follow() as mode:
        out = function(*args)
    return mode.origins, out


def b(n=B):
    return Factor(ROWS, n)


def f(n):
    return Factor(FEATURES, n)


Q, ROW, E, HEADS = (b(),), (b(N),), (f(D),), (f(H),)


def project(x):
    return F.linear(x, WEIGHT)


def split(x):
    return project(x).view(B, N, H, D)


def heads(x):
    return split(x).transpose(1, 2)


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (project, (Q, ROW, (f(DIM),))),
        (lambda x: F.linear(x, WEIGHT * 2), (Q, ROW, (f(DIM),))),
        (lambda x: x @ F.normalize(WEIGHT, dim=-1).T, (Q, ROW, (f(DIM),))),
        (lambda x: x @ WEIGHT, (Q, ROW, (f(DIM),))),
        (lambda x: F.layer_norm(x, (DIM,)), (Q, ROW, (f(DIM),))),
        (lambda x: F.embedding(torch.zeros(B, N, dtype=torch.long), WEIGHT), (Q, ROW, (f(DIM),))),
        (lambda x: F.conv1d(x.mT, KERNEL), (Q, (f(DIM),), ROW)),
        (split, (Q, ROW, HEADS, E)),
        (heads, (Q, HEADS, ROW, E)),
        (lambda x: heads(x).reshape(B * H, N, D), ((b(), f(H)), ROW, E)),
        (lambda x: split(x).permute(2, 0, 1, 3).reshape(-1, N, D), ((f(H), b()), ROW, E)),
        (lambda x: split(x).movedim(2, 0), (HEADS, Q, ROW, E)),
        (lambda x: split(x).unbind(2)[0], (Q, ROW, E)),
        (lambda x: project(x).chunk(H, -1)[1], (Q, ROW, E)),
        (lambda x: project(x)[..., :D], (Q, ROW, E)),
        (lambda x: split(x)[:, :, 0], (Q, ROW, E)),
        (lambda x: split(x)[:, None, :, 0], (Q, (), ROW, E)),
        (lambda x: split(x).select(2, 0), (Q, ROW, E)),
        (lambda x: project(x).narrow(2, 0, D), (Q, ROW, E)),
        (lambda x: torch.stack(project(x).split(D, 2)), (HEADS, Q, ROW, E)),
        (lambda x: torch.stack([split(x)[:, :, n] for n in range(H)], 1), (Q, (Factor(STACKED, H),), ROW, E)),
        (lambda x: torch.stack(split(x).unbind(2), 1), (Q, HEADS, ROW, E)),
        (lambda x: torch.stack([project(x), project(x)], 1), (Q, (Factor(STACKED, 2),), ROW, (f(DIM),))),
        (lambda x: torch.cat(project(x).split(D, 2), 0), ((f(H), b()), ROW, E)),
        (lambda x: torch.cat(project(x).split(D, 2), 2), (Q, ROW, (f(DIM),))),
        (lambda x: torch.cat(project(x).split(2, 1), 1), (Q, ROW, (f(DIM),))),
        (lambda x: torch.cat((project(x)[:, :1], project(x)[:, 1:]), 1), (Q, ROW, (f(DIM),))),
        (lambda x: (lambda y: torch.cat((y[:, :1], y[:, 1:]), 1))(project(x)), (Q, ROW, (f(DIM),))),
        (lambda x: torch.cat([heads(x).reshape(B * H, N, D)], 0), ((b(), f(H)), ROW, E)),
        (lambda x: heads(x).unfold(2, 2, 1), (Q, HEADS, (b(N - 1),), E, (b(2),))),
        (lambda x: heads(x).repeat(1, 2, 1, 1), (Q, (Factor(REPEATED, 2), f(H)), ROW, E)),
        (lambda x: heads(x)[:, :, None].expand(-1, -1, 2, -1, -1), (Q, HEADS, (Factor(REPEATED, 2),), ROW, E)),
        (lambda x: heads(x).repeat_interleave(2, 1), (Q, (f(2 * H),), ROW, E)),
        (lambda x: F.pad(heads(x), (0, 0, 1, 0)), (Q, HEADS, (b(N + 1),), E)),
        (lambda x: heads(x).mul(2).relu() + torch.ones(N, 1), (Q, HEADS, ROW, E)),
        (lambda x: heads(x) @ heads(x).mT, (Q, HEADS, ROW, ROW)),
        (lambda x: torch.einsum("bnhd,bmhd->bhnm", split(x), split(x)), (Q, HEADS, ROW, ROW)),
        (lambda x: torch.cdist(heads(x), heads(x)), (Q, HEADS, ROW, ROW)),
        (lambda x: F.linear(project(x)[0], project(x)[1]), (ROW, ROW)),
        (lambda x: heads(x).softmax(-1), (Q, HEADS, ROW, E)),
        (lambda x: heads(x).sum(-1), (Q, HEADS, ROW)),
        (lambda x: heads(x).mean(2, keepdim=True), (Q, HEADS, (), E)),
        (lambda x: heads(x).max(-1).values, (Q, HEADS, ROW)),
        (
            lambda x: torch.einsum("bnd,dhe->bhne", x, WEIGHT.view(DIM, H, D)),
            (
                (Factor(UNKNOWN, B),),
                (Factor(LEARNED, H),),
                (Factor(UNKNOWN, N),),
                E,
            ),
        ),
        (
            lambda x: x.view(B, N, H, D).flatten(0, 1),
            ((Factor(UNKNOWN, B), Factor(UNKNOWN, N)), (Factor(PRESUMED, H),), (Factor(PRESUMED, D),)),
        ),
    ],
)
def test_dims_are_followed(function, dims):
    origins, out = origins_of(function, torch.randn(B, N, DIM))
    assert origins.get(out).dims == dims


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: project(x).topk(2).values,
        lambda x: F.unfold(project(x)[:, None], 2),
        lambda x: torch.arange(3.0),
        lambda x: BUFFER * 2,
    ],
)
def test_of_other_results_nothing_is_known(function):
    origins, out = origins_of(function, torch.randn(B, N, DIM))
    assert origins.get(out) is None


@pytest.mark.parametrize(
    ("function", "is_constant"),
    [
        (lambda x: BUFFER, True),
        (lambda x: BUFFER[None].expand(2, -1, -1), True),
        (lambda x: torch.linspace(0, 1, 5)[:, None] * 2, True),
        (
            lambda x: torch.stack(torch.meshgrid(torch.arange(2.0), torch.ones(3), indexing="ij"), -1).view(6, 2),
            True,
        ),
        (lambda x: torch.zeros_like(x).softmax(-1), True),
        (lambda x: x, False),
        (lambda x: WEIGHT * 2, False),
        (lambda x: torch.zeros(N, DIM) + x, False),
        (lambda x: torch.zeros(B, N, DIM).copy_(x), False),
    ],
)
def test_constants_depend_on_no_input_and_no_parameter(function, is_constant):
    origins, out = origins_of(function, torch.randn(B, N, DIM))
    assert origins.is_constant(out) == is_constant


@pytest.mark.parametrize(
    ("function", "is_learned"),
    [
        (lambda x: WEIGHT, True),
        (lambda x: F.normalize(WEIGHT, dim=-1) * 2, True),
        (lambda x: (F.normalize(WEIGHT, dim=-1) + torch.ones(DIM)).T.reshape(H, D, DIM), True),
        (lambda x: F.normalize(WEIGHT[:D], dim=-1)[None].expand(B, -1, -1) * 2, True),
        (lambda x: WEIGHT.chunk(2)[0] * 2, True),
        (lambda x: WEIGHT * 2 + x[0, 0], False),
        (lambda x: WEIGHT * 2 + x.mT @ x, False),
        (lambda x: BUFFER * 2, False),
        (lambda x: x, False),
    ],
)
def test_functions_of_parameters_alone_are_learned(function, is_learned):
    origins, out = origins_of(function, torch.randn(B, N, DIM))
    assert origins.is_learned(out) == is_learned


def test_a_buffer_that_the_model_writes_to_is_a_cache_from_then_on():
    origins, x = DimOrigins(lambda x: x is BUFFER), torch.randn(N, 2)
    assert origins.is_constant(BUFFER)
    origins.follow(Tensor.__setitem__, (BUFFER[:2], slice(None), x[:2]), {}, None)
    assert not origins.is_constant(BUFFER)
    origins.clear()
    assert not origins.is_constant(BUFFER)


def test_nothing_is_held_of_tensors_that_are_gone():
    origins, out = origins_of(project, torch.randn(B, N, DIM))
    assert origins.get(out) is not None
    origins.clear()
    assert origins.get(out) is None


@pytest.mark.parametrize(
    ("dims", "shape", "resized"),
    [
        ([(b(6),)], (2, 3), ((b(2),), (b(3),))),
        ([(b(2),), (f(12),)], (6, 4), ((b(2), f(3)), (f(4),))),
        ([(b(2),), ()], (2,), ((b(2),),)),
        ([(b(6),)], (4, 2), None),
        ([(b(6),)], (3,), None),
        ([(b(6),)], (0,), None),
    ],
)
def test_a_reshape_splits_and_merges_factors(dims, shape, resized):
    assert resize_dims(dims, shape) == resized


def test_of_dims_that_broadcast_the_one_with_features_counts():
    assert join_dims([[(b(3),), ()], [(f(3),), (b(2),)], [(b(2),)]]) == ((f(3),), (b(2),))
    assert kinds_of([(b(3), f(2)), ()]) == {ROWS, FEATURES}


@pytest.mark.parametrize(
    ("name", "args", "order"),
    [
        ("transpose", (None, 0, -1), [2, 1, 0]),
        ("permute", (None, (2, 0, 1)), [2, 0, 1]),
        ("permute", (None, 2, 0, 1), [2, 0, 1]),
        ("movedim", (None, 2, 0), [2, 0, 1]),
        ("movedim", (None, (0, 1), (1, 2)), [2, 0, 1]),
        ("mT", (None,), [0, 2, 1]),
        ("T", (None,), [2, 1, 0]),
    ],
)
def test_the_order_of_dims_is_that_of_the_call(name, args, order):
    assert dim_order(name, args, {}, 3) == order


def test_a_view_of_a_parameter_is_one():
    assert is_parameter(WEIGHT)
    assert is_parameter(WEIGHT.view(-1))
    assert not is_parameter(torch.zeros(2))


def test_what_a_rule_found_before_holds_for_other_tensors():
    norm, linear = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)

    def parts(x):
        q, k, v = (y.view(B, N, H, D).transpose(1, 2) for y in linear(norm(x)).chunk(3, -1))
        scores = q @ k.mT / D**0.5
        return q, k, v, scores, (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, DIM) + x

    dim_origins._RESULTS.clear()
    first, found = origins_of(parts, torch.randn(B, N, DIM))
    remembered = len(dim_origins._RESULTS)
    second, again = origins_of(parts, torch.randn(B, N, DIM))
    assert remembered == len(dim_origins._RESULTS) > 0
    assert [first.get(x).dims for x in found] == [second.get(x).dims for x in again]
    assert [second.get(x).piece.start for x in again[:3]] == [0, DIM, 2 * DIM]
    assert {first.get(x).piece.family for x in found[:3]}.isdisjoint(second.get(x).piece.family for x in again[:3])


@pytest.mark.parametrize("shapes", [((B, N, DIM), (N, B, DIM)), ((2, 6, DIM), (3, 4, DIM))])
def test_what_a_rule_found_for_one_shape_is_not_said_of_another(shapes):
    for shape in shapes:
        origins, out = origins_of(lambda x: F.linear(x, WEIGHT).flatten(0, 1), torch.randn(shape))
        assert origins.get(out).dims == ((b(shape[0]), b(shape[1])), (f(DIM),))


def test_remembered_results_are_bounded(monkeypatch):
    monkeypatch.setattr(dim_origins, "MAX_RESULTS", 8)
    for n in range(2, 40):
        origins, out = origins_of(lambda x: F.linear(x, WEIGHT).transpose(0, 1), torch.randn(n, 3, DIM))
        assert origins.get(out).dims == ((b(3),), (b(n),), (f(DIM),))
    assert len(dim_origins._RESULTS) <= 9

"""Which calls of a graph take the same mask, which masks are the same in every run, and which keys are copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from regard.lens.interception.graph_masks import GraphMask, GraphMasks, HeadCopies
from regard.lens.interception.sdpa import SDPA

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("dynamo")]

B, G, H, N, D = 2, 2, 4, 5, 8


class Twice(nn.Module):
    """Two calls of SDPA, each under a mask that a function makes of the input."""

    def __init__(self, mask, repeat=lambda k: k.repeat_interleave(H // G, 1)) -> None:
        super().__init__()
        self.mask, self.repeat = mask, repeat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.repeat(x[:, :G])
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, k, k, attn_mask=self.mask(x)) + x
        return x


def graph_of(model: nn.Module) -> tuple[fx.GraphModule, list[fx.Node]]:
    found: list[fx.GraphModule] = []

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    torch.compile(model, backend=keep, fullgraph=True)(torch.randn(B, H, N, D))
    (graph,) = found
    return graph, [node for node in graph.graph.nodes if node.target is SDPA]


def masks_of(mask):
    graph, calls = graph_of(Twice(mask))
    known = GraphMasks(graph, calls)
    return [known.of(call.kwargs["attn_mask"]) for call in calls]


def causal(x):
    n = x.shape[2]
    return torch.arange(n)[:, None] >= torch.arange(n)[None]


def with_setitem(x):
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[:, 0] = False
    return mask


def written_by_a_view(x):
    mask = torch.zeros(N, N)
    mask[1].fill_(-1.0)
    return mask


def test_a_mask_without_inputs_is_known_before_the_graph_runs():
    one, other = masks_of(causal)
    assert one.number == other.number
    assert torch.equal(one.constant(), torch.ones(N, N, dtype=torch.bool).tril())


def test_functions_of_operator_whose_names_end_as_if_they_wrote_do_not_write():
    one, _ = masks_of(lambda x: causal(x) & ~causal(x).mT)
    assert torch.equal(one.constant(), torch.ones(N, N, dtype=torch.bool).tril(-1))


def test_a_mask_of_the_input_is_shared_if_it_is_computed_from_the_same_nodes():
    given = []

    def mask(x):
        given[:] = given or [x]
        return given[0][:, :1, :, :1].mT > 0

    one, other = masks_of(mask)
    assert one.constant is other.constant is None
    assert one.number == other.number
    one, other = masks_of(lambda x: x[:, :1, :, :1].mT > 0)
    assert one.number != other.number


@pytest.mark.parametrize("mask", [with_setitem, written_by_a_view])
def test_masks_that_a_graph_writes_to_are_neither_shared_nor_known(mask):
    one, other = masks_of(mask)
    assert one.constant is other.constant is None
    assert one.number != other.number


def test_random_masks_are_neither_shared_nor_known():
    one, other = masks_of(lambda x: torch.rand(N, N) > 0.5)
    assert one.constant is other.constant is None
    assert one.number != other.number


def test_a_mask_by_vmap_is_not_known():
    one, _ = masks_of(lambda x: torch.vmap(lambda row: torch.arange(N) <= row)(torch.arange(N)))
    assert one.constant is None


@pytest.mark.parametrize(
    ("repeat", "copies"),
    [
        (lambda k: k.repeat_interleave(2, 1), 2),
        (lambda k: k.repeat_interleave(2, dim=-3), 2),
        (lambda k: torch.repeat_interleave(k, 2, dim=1).contiguous(), 2),
        (lambda k: k[:, :, None].expand(B, G, 2, N, D).reshape(B, H, N, D), 2),
        (lambda k: k[:, :, None].expand(B, G, 2, N, D).flatten(1, 2), 2),
        (lambda k: k[:, None].expand(B, 2, G, N, D).reshape(B, H, N, D), 1),  # copies are not adjacent
        (lambda k: k.repeat(1, 2, 1, 1), 1),
        (lambda k: torch.cat((k, k + 1), 1), 1),
        (lambda k: torch.stack((k, k + 1), 2).reshape(B, H, N, D), 1),
    ],
)
def test_adjacent_copies_of_heads_are_counted(repeat, copies):
    _, calls = graph_of(Twice(causal, repeat))
    assert [HeadCopies.of(call.args[1]).number for call in calls] == [copies, copies]


def test_rows_with_keys():
    seen = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    for values in (seen, torch.zeros(3, 3).masked_fill(~seen, -torch.inf)):
        assert GraphMask(lambda values=values: values).rows_with_keys.tolist() == [False, True, True]

"""Block masks of FlexAttention, read by their tiles: the same as pair by pair, without asking about every pair."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import regard as R
from regard.lens import capture
from regard.lens.terms import block_mask as tiled_masks
from regard.lens.terms.block_mask import Tiled, by_blocks, rows_of_blocks
from regard.lens.terms.flex_mod_probe import rows_of
from regard.lens.terms.infer_mask import Rows, recognize

SIZE = 16
IDS = torch.arange(100) // 13
LENGTHS = torch.tensor([21, 70, 0])


def compiled(q, k, v, block_mask):
    """As flex_attention would be, compiled; that function itself could not be counted."""
    b, h, i, j = (torch.arange(n) for n in (*q.shape[:3], k.shape[2]))
    keep = block_mask.mask_mod(b[:, None, None, None], h[:, None, None], i[:, None], j)
    return F.scaled_dot_product_attention(q, k, v, keep.expand(len(b), len(h), len(i), len(j)))


compiled._torchdynamo_orig_callable = flex_attention


def causal(b, h, i, j):
    return j <= i


def window(b, h, i, j):
    return (i - j < 20) & (j <= i)


def around(b, h, i, j):
    return (i - j).abs() < 9


def documents(b, h, i, j):
    return (IDS[i] == IDS[j]) & (j <= i)


def prefix(b, h, i, j):
    return (j <= i) | (j < 24)


def padded(b, h, i, j):
    return (j < LENGTHS[b]) & (j <= i)


def everything(b, h, i, j):
    return j >= 0


def nothing(b, h, i, j):
    return j < 0


def dilated(b, h, i, j):
    return (i - j) % 3 == 0


MODS = [causal, window, around, documents, prefix, padded, everything, nothing, dilated]
KNOWN = {
    causal: R.Causal(),
    window: R.Causal() & R.Window(20),
    around: R.Window(9),
    everything: None,
    prefix: R.Causal() | R.Prefix(24),
}


def blocks(mod, n, m, size=SIZE):
    batch = 3 if mod is padded else None
    return create_block_mask(mod, batch, None, n, m, device="cpu", BLOCK_SIZE=size)


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize(("n", "m"), [(64, 64), (77, 77), (50, 90), (90, 50), (1, 17)])
def test_tiles_tell_what_pairs_tell(mod, n, m):
    shape = (3, 2, n, m)
    tiled = rows_of_blocks(blocks(mod, n, m), shape, torch.device("cpu"))
    assert isinstance(tiled, Tiled)
    plain = rows_of(mod, shape, torch.device("cpu"))
    got, want = tiled.edges(), plain.edges()
    assert torch.equal(got.some, want.some)
    assert got.everything == want.everything
    assert torch.equal(got.keep, want.keep)
    for name in ("first", "last"):
        assert torch.equal(getattr(got, name)[got.some], getattr(want, name)[want.some])
    assert torch.equal(tiled.block(0, n), plain.block(0, n))
    assert repr(recognize(tiled)) == repr(recognize(plain))
    if mod in KNOWN and n == m > 24:
        assert recognize(tiled) == (KNOWN[mod], 0)


@pytest.mark.parametrize("mod", [window, padded, prefix])
def test_some_tiles_at_a_time_tell_the_same(mod, monkeypatch):
    shape, cpu = (3, 2, 90, 90), torch.device("cpu")
    whole = rows_of_blocks(blocks(mod, 90, 90), shape, cpu).edges()
    monkeypatch.setattr(tiled_masks, "ENTRIES", 2 * SIZE * SIZE)
    parts = rows_of_blocks(blocks(mod, 90, 90), shape, cpu)
    assert isinstance(parts, Tiled)
    for name in ("first", "last", "some", "keep"):
        assert torch.equal(getattr(parts.edges(), name), getattr(whole, name))
    mask, offset = recognize(parts)
    assert parts.are_those_of(mask, offset)
    assert not parts.are_those_of(R.Window(2), offset)


def test_a_list_that_errs_in_the_last_tiles_is_found_out(monkeypatch):
    monkeypatch.setattr(tiled_masks, "ENTRIES", 1)
    mask = blocks(causal, 64, 64)
    assert isinstance(rows_of_blocks(mask, (1, 1, 64, 64), torch.device("cpu")), Tiled)
    mask.full_kv_num_blocks[..., -1] -= 1
    assert type(rows_of_blocks(mask, (1, 1, 64, 64), torch.device("cpu"))) is Rows


@pytest.mark.parametrize("mod", MODS)
def test_a_mask_is_believed_only_where_every_pair_agrees(mod):
    n = 70
    tiled = rows_of_blocks(blocks(mod, n, n), (3, 2, n, n), torch.device("cpu"))
    plain = rows_of(mod, (3, 2, n, n), torch.device("cpu"))
    masks = [
        *(R.Causal(), R.Causal() & R.Window(20), R.Causal() & R.Window(21), R.Window(9), R.Window(10), R.Diagonal()),
        *(
            R.Causal() | R.Prefix(24),
            R.Causal() | R.Prefix(25),
            R.Documents(IDS[:n]),
            R.Causal() & R.Documents(IDS[:n]),
        ),
        *(R.Padding((70,)), R.Causal() & R.Padding((69,)), R.Dilated(24, 3), R.Rule(causal), R.Rule(dilated)),
    ]
    for mask in masks:
        for offset in (0, 1):
            assert tiled.are_those_of(mask, offset) is plain.are_those_of(mask, offset), (mask, offset)


@pytest.mark.parametrize(
    "mod",
    [
        pytest.param(lambda b, h, i, j: (j <= i) & (i - j < 8 * (h + 1)), id="heads differ"),
        pytest.param(lambda b, h, i, j: (j <= i) & (j < LENGTHS[b]), id="texts differ, one list"),
        pytest.param(lambda b, h, i, j: torch.ones(3, 80, 80).bool().tril()[b][i, j], id="one pair at a time"),
    ],
)
def test_others_are_read_pair_by_pair(mod):
    n, shape = 64, (2, 2, 64, 64)
    rows = rows_of_blocks(blocks(mod, n, n), shape, torch.device("cpu"))
    assert type(rows) is Rows
    assert torch.equal(rows.block(0, n), rows_of(mod, shape, torch.device("cpu")).block(0, n))


def test_where_lists_and_function_differ_the_function_is_asked_about_every_pair():
    count, places = torch.ones(1, 1, 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1)
    mask = BlockMask.from_kv_blocks(count, places.expand(1, 1, 4, 4).contiguous(), BLOCK_SIZE=SIZE, mask_mod=causal)
    rows = rows_of_blocks(mask, (1, 1, 64, 64), torch.device("cpu"))
    assert type(rows) is Rows
    skipping = rows_of(by_blocks(mask), (1, 1, 64, 64), torch.device("cpu")).block(0, 64)
    assert torch.equal(rows.block(0, 64), torch.ones(1, 1, 64, 64).bool().tril())
    assert not torch.equal(rows.block(0, 64), skipping)


class Held(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x, mask):
        return self.call(x, x, x, block_mask=mask)


class Layer(nn.Module):
    def forward(self, x, mask):
        return compiled(x, x, x, block_mask=mask)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return x


@torch.no_grad()
def test_a_pass_asks_about_few_pairs_and_once_for_all_its_layers():
    asked = []

    def counted(b, h, i, j):
        asked.append(torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape).numel())
        return (j <= i) & (i - j < 300)

    n, x, model = 4096, torch.randn(1, 1, 4096, 8), Model(3)
    mask = create_block_mask(counted, None, None, n, n, device="cpu")
    took = []
    for layers in (1, 3):
        model.layers = nn.ModuleList(Layer() for _ in range(layers))
        asked.clear()
        model(x, mask)
        plain = sum(asked)
        asked.clear()
        with capture(model) as tape:
            model(x, mask)
        took.append(sum(asked) - plain)
    assert [A.call.mask for A in tape.values()] == [R.Causal() & R.Window(300)] * 3
    assert took[0] == took[1] < n * n / 5


@torch.no_grad()
def test_layers_called_one_by_one_are_each_read_anew():
    lengths = torch.tensor([4])
    mask = create_block_mask(lambda b, h, i, j: j < lengths[0], None, None, 10, 10, device="cpu")
    model, x = Model(2), torch.randn(1, 1, 10, 8)
    with capture(model) as tape:
        lengths.fill_(4)
        model(x, mask)
        lengths.fill_(7)
        out = model.layers[0](x, mask)
    read = {key: A.call.mask for key, A in tape.items()}
    assert read == {
        ("layers.0", 0): R.Padding((4,)),
        ("layers.1", 0): R.Padding((4,)),
        ("layers.0", 1): R.Padding((7,)),
    }
    torch.testing.assert_close(tape["layers.0", 1] @ x, out)


@torch.no_grad()
def test_one_that_takes_a_pair_at_a_time_is_read():
    table = torch.rand(2, 20, 20) < 0.5
    table |= torch.eye(20).bool()
    mask = create_block_mask(lambda b, h, i, j: table[b][i, j], 2, None, 20, 20, device="cpu", BLOCK_SIZE=SIZE)
    x = torch.randn(2, 2, 20, 8)

    def attended(q, k, v, block_mask):
        return F.scaled_dot_product_attention(q, k, v, table[:, None])

    attended._torchdynamo_orig_callable = flex_attention
    layer = Held(attended)
    with capture(layer) as tape:
        out = layer(x, mask)
    torch.testing.assert_close(tape[0] @ x, out)

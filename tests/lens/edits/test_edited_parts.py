"""An edited attention that runs in parts equals the one that runs as terms, and the definition."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.lens import Boost, Cut, Only, Scale, Temperature, capture, edit
from regard.lens.edits import edited_parts
from tests.lens.edits.dense_edits import dense_edited, edited_scores


class Sdpa(nn.Module):
    """Grouped attention by PyTorch's kernel."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


EDITS = {
    "one query": [Cut(queries=-1, keys=slice(2, 5))],
    "queries, and a bias": [Cut(queries=[3, 7], keys=[0, 2], heads=1), Boost(slice(1, 4), -1.5, queries=[7, 9])],
    "a head": [Cut(keys=slice(3, 6), heads=1)],
    "two heads alike": [Cut(keys=slice(3, 6), heads=[0, 1]), Boost(7, 2.0, heads=[0, 1])],
    "two heads": [Cut(keys=slice(3, 6), heads=[0, 1]), Boost(7, 2.0, heads=1)],
    "a head of some queries": [Cut(queries=slice(8, None), keys=slice(3, 6), heads=6)],
    "later queries": [Cut(queries=slice(8, None), keys=slice(3, 6))],
    "queries in the middle, and a bias": [Boost([2, 9], 1.0, queries=slice(4, 12)), Cut(queries=slice(9, 14), keys=1)],
    "queries in the middle of a head": [Cut(queries=slice(3, 12), keys=slice(2, 10), heads=6)],
    "keys in the middle": [Cut(keys=slice(3, 6))],
    "the first keys": [Cut(keys=slice(0, 3))],
    "the last keys": [Cut(keys=slice(-3, None))],
    "keys here and there": [Cut(keys=[0, 1, 4, 8, 9, 16])],
    "a bias": [Boost(slice(3, 5), 2.0)],
    "a lower bias": [Boost([0, 4], -3.0)],
    "two biases": [Boost([0, 4], -3.0), Boost([4, 6], 1.0), Boost(9, 1e-3)],
    "a bias and a cut": [Boost([2, 4], 1.0), Cut(keys=[4, 5])],
    "many keys": [Boost(slice(2, 9), -2.0)],
    "many keys for some queries": [Boost(slice(2, 9), 2.0, queries=slice(5, 14)), Cut(keys=[4, 11])],
    "many keys of two kinds": [Boost(slice(2, 9), 1.0), Boost(slice(6, 12), -2.0, heads=None)],
    "queries that see nothing": [Cut(queries=slice(0, 7), keys=slice(0, 9))],
    "every key": [Boost(slice(None), -2.0)],
    "every other key": [Boost(range(0, 17, 2), 1.0)],
    "all but one": [Cut(keys=slice(1, None))],
}
GENERAL = {"every other key"}


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Runs of parts at any length, counted."""
    monkeypatch.setattr(edited_parts, "MIN_ENTRIES", 1)
    monkeypatch.setattr(edited_parts, "FEW_QUERIES", (3, 6))
    monkeypatch.setattr(edited_parts, "MAX_STRIP", 3)
    found = []

    def count(*args):
        found.append(edited_parts_run(*args))
        return found[-1]

    edited_parts_run = edited_parts.run_parts
    monkeypatch.setattr(sys.modules["regard.lens.edits.edit"], "run_parts", count)
    return found


def tensors(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(2, 8, 17, 4, dtype=dtype), *torch.randn(2, 2, 2, 17, 4, dtype=dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", EDITS)
@torch.no_grad()
def test_parts_equal_the_definition(name, causal, parts):
    q, k, v = tensors()
    keep = torch.ones(17, 17, dtype=torch.bool).tril() if causal else None
    want, weights = dense_edited(q, k, v, EDITS[name], keep=keep)
    model = nn.ModuleDict({"self_attn": Sdpa(causal)})["self_attn"]
    with edit(model, {"*": EDITS[name]}), capture(model) as tape:
        out = model(q, k, v)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(tape[0].dense(), weights, atol=1e-12, rtol=1e-12)
    assert (parts[0] is None) == (name in GENERAL)


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_errors_are_those_of_plain_pytorch(name, dtype):
    q, k, v = tensors(dtype)
    keep = torch.ones(17, 17, dtype=torch.bool).tril()
    want, _ = dense_edited(q, k, v, EDITS[name], keep=keep)
    added = edited_scores(torch.zeros(2, 8, 17, 17), EDITS[name]).masked_fill(~keep, -torch.inf).to(dtype)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=added, enable_gqa=True).nan_to_num(0.0)
    model = nn.ModuleDict({"self_attn": Sdpa(True)})["self_attn"]
    with edit(model, {"*": EDITS[name]}):
        assert (model(q, k, v).double() - want).abs().max() <= 2 * (theirs.double() - want).abs().max()


@pytest.mark.parametrize("name", EDITS)
def test_gradients_flow_through_parts(name):
    found = []
    for is_dense in (False, True):
        leaves = [x.requires_grad_() for x in tensors()]
        if is_dense:
            out, _ = dense_edited(*leaves, EDITS[name], keep=torch.ones(17, 17, dtype=torch.bool).tril())
        else:
            model = nn.ModuleDict({"self_attn": Sdpa(True)})["self_attn"]
            with edit(model, {"*": EDITS[name]}):
                out = model(*leaves)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_hidden_garbage_does_not_reach_the_other_queries():
    q, k, v = tensors()
    k[:, :, 3], v[:, :, 3] = torch.nan, torch.inf
    model = nn.ModuleDict({"self_attn": Sdpa(True)})["self_attn"]
    with edit(model, {"*": Cut(keys=3)}):
        out = model(q, k, v)
    k[:, :, 3], v[:, :, 3] = 0, 0
    want, _ = dense_edited(q, k, v, [Cut(keys=3)], keep=torch.ones(17, 17, dtype=torch.bool).tril())
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_texts_with_different_keys_run_as_terms(parts):
    q, k, v = tensors()
    model = nn.ModuleDict({"self_attn": Sdpa(True)})["self_attn"]
    words = [["a"] * 5 + ["b"] * 12, ["a"] * 6 + ["b"] * 11]
    with edit(model, {"*": Cut(keys=lambda text: [n for n, x in enumerate(text) if x == "a"])}, words):
        out = model(q, k, v)
    assert parts == [None]
    for n in (0, 1):
        cut = [Cut(keys=slice(0, 5 + n))]
        want, _ = dense_edited(q[n : n + 1], k[n : n + 1], v[n : n + 1], cut, keep=torch.ones(17, 17).tril().bool())
        torch.testing.assert_close(out[n : n + 1], want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["bert", "llama"])
@torch.no_grad()
def test_an_architecture_edited_in_parts_equals_one_edited_by_terms(name, parts, monkeypatch):
    architectures = pytest.importorskip("tests.lens.test_architectures")
    config = architectures.small(architectures.CONFIG_MAPPING[name])
    model = architectures.fused(config)
    given = architectures.inputs(model, config)
    for each in ("one query", "a head", "later queries", "keys in the middle", "a bias", "a lower bias"):
        found = []
        for entries in (1, 2**60):
            monkeypatch.setattr(edited_parts, "MIN_ENTRIES", entries)
            with edit(model, {"*.1.*": EDITS[each]}):
                found.append(model(**given)[0])
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert [x is None for x in parts] == [False, True] * 6


@pytest.mark.parametrize("name", ["one query", "queries, and a bias"])
@torch.no_grad()
def test_few_queries_by_a_product_that_waits_for_nothing_equal_the_definition(name, monkeypatch):
    """The way of a GPU: hidden values that are not finite change nothing, and visible ones are seen."""
    q, k, v = tensors()
    # A key that is cut, and one that earlier queries do not see.
    v[0, :, 2], v[1, :, 8, 1] = torch.nan, torch.inf
    monkeypatch.setattr(edited_parts, "_rows_of", edited_parts._rows_without_waiting)
    monkeypatch.setattr(edited_parts, "KEYS_PER_PIECE", 5)
    model = nn.ModuleDict({"self_attn": Sdpa(True)})["self_attn"]
    with edit(model, {"*": EDITS[name]}):
        out = model(q, k, v)
    found = [each.queries for each in EDITS[name]]
    rows = sorted({n % 17 for each in found for n in ([each] if isinstance(each, int) else each)})
    keep = torch.ones(17, 17, dtype=torch.bool).tril()
    for n in rows:
        want = torch.stack([dense_row(q, k, v, EDITS[name], keep, head, n) for head in range(8)], 1)
        torch.testing.assert_close(
            out[:, :, n].nan_to_num(9.0), want.nan_to_num(9.0, posinf=9.0), atol=1e-12, rtol=1e-12
        )


def dense_row(q, k, v, edits, keep, head, n):
    """One query of one head, over the keys that it sees and no others."""
    added = edited_scores(torch.zeros(2, 8, 17, 17, dtype=q.dtype), edits).masked_fill(~keep, -torch.inf)[:, head, n]
    found = []
    for text in range(2):
        seen = added[text] > -torch.inf
        s = q[text, head, n] @ k[text, head // 4, seen].mT * q.shape[-1] ** -0.5 + added[text][seen]
        found.append(s.softmax(-1) @ v[text, head // 4, seen])
    return torch.stack(found)


@pytest.mark.parametrize("heads", [[3], [0, 6], [1, 2, 3], [0, 1, 6], [3, 3], [0, 0, 1]])
def test_heads_are_taken_in_any_order(heads):
    x = torch.randn(2, 8, 5, 3)
    torch.testing.assert_close(edited_parts._take_heads(x, heads), x[:, heads])


class Layers(nn.ModuleList):
    def forward(self, q, k, v):
        for layer in self:
            q = layer(q, k, v)
        return q


NO_WAIT = {
    "one query": Cut(queries=-1, keys=slice(2, 5)),
    "a head": Cut(keys=slice(3, 6), heads=1),
    "two heads": Cut(queries=slice(8, None), keys=slice(3, 6), heads=[0, 6]),
    "later queries": Cut(queries=slice(8, None), keys=slice(3, 6)),
    "a bias": Boost(slice(3, 5), 2.0),
    "a lower bias of a head": Boost(slice(3, 5), -2.0, heads=2),
    "a temperature": Temperature([0, 3], 0.5),
    "a factor": Scale([3], 0.5),
    "off": Scale([3], 0),
    "only": Only([1, 2]),
}


@pytest.mark.parametrize("name", NO_WAIT)
@torch.no_grad()
def test_numbers_are_copied_to_the_device_for_the_first_layer_alone(name, monkeypatch):
    monkeypatch.setattr(edited_parts, "_rows_of", edited_parts._rows_without_waiting)

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            copies.append(func.__name__ in ("lift_fresh.default", "nonzero.default"))
            return func(*args, **(kwargs or {}))

    counts = []
    for layers in (2, 2, 4):
        copies = []
        model = Layers(Sdpa(True) for _ in range(layers))
        with edit(model, {"*": NO_WAIT[name]}), Copies():
            model(*tensors())
        counts.append(sum(copies))
    assert counts[1] == counts[2]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NO_WAIT)
@torch.no_grad()
def test_the_host_waits_for_a_gpu_in_the_first_layer_alone(name):
    q, k, v = (torch.randn(1, h, 2048, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    model = Layers(Sdpa(True) for _ in range(3))

    def raise_where_it_waits(module, args):
        torch.cuda.set_sync_debug_mode("error")

    for _ in range(2):  # kernels are compiled the first time
        with edit(model, {"*": NO_WAIT[name]}):
            model(q, k, v)
    hook = model[1].register_forward_pre_hook(raise_where_it_waits)
    end = model[2].register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"))
    try:
        with edit(model, {"*": NO_WAIT[name]}):
            model(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        hook.remove()
        end.remove()


@pytest.mark.gpu
@pytest.mark.parametrize("name", EDITS)
@torch.no_grad()
def test_errors_on_a_gpu_are_those_of_plain_pytorch(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 70, 64, dtype=torch.bfloat16) for h in (8, 2, 2))
    keep = torch.ones(70, 70, dtype=torch.bool).tril()
    want, _ = dense_edited(q, k, v, EDITS[name], keep=keep)
    added = edited_scores(torch.zeros(1, 8, 70, 70), EDITS[name]).masked_fill(~keep, -torch.inf).to(q)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=added, enable_gqa=True).nan_to_num(0.0)
    model = nn.ModuleDict({"self_attn": Sdpa(True)})["self_attn"]
    with edit(model, {"*": EDITS[name]}):
        out = model(q.cuda(), k.cuda(), v.cuda()).cpu()
    assert (out.double() - want).abs().max() <= 2 * (theirs.double() - want).abs().max()

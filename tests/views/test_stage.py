"""Stage: heads brought to a device, the same to the bit, within the room there is."""

import pytest
import torch
from torch import nn

from regard import Additive, Alibi, Causal, Dense, Padding, Sparsemax, weights
from regard.lens import Tape, capture
from regard.nn import Attention
from regard.views.answers import Answers
from regard.views.catalog import Capture
from regard.views.library import Chosen, Library
from regard.views.server import serve
from regard.views.sheet import Head
from regard.views.stage import Stage
from regard.views.work import Desk

B, H, N, D = 2, 4, 37, 6
CPU = torch.device("cpu")


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def some(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CALLS = [
    pytest.param({}, id="plain"),
    pytest.param({"mask": Causal(), "bias": Alibi(H)}, id="slopes of heads"),
    pytest.param({"mask": Padding((N, 20))}, id="lengths of batch rows"),
    pytest.param({"mask": Dense(some(B, H, N, N) > 0.2)}, id="a mask of each head"),
    pytest.param({"score": Additive(some(H, D))}, id="a vector of each head"),
    pytest.param({"normalize": Sparsemax()}, id="sparse"),
]


@pytest.mark.parametrize("terms", CALLS)
def test_a_head_that_was_brought_is_that_head(terms):
    A = weights(some(B, H, N, D), some(B, H, N, D).roll(1, 2), **terms)
    for batch, head in ((0, 0), (1, 3)):
        brought, whole = Stage(CPU).bring("x", A, batch, head, None), Head(A, batch, head)
        at = slice(3, 30), slice(1, 33)
        assert torch.equal(brought.block(*at), whole.block(*at))
        rows = torch.tensor([30, 2, 7])
        assert torch.equal(brought.block(rows, slice(0, N)), whole.block(rows, slice(0, N)))


def test_heads_that_were_chosen_at_capture_keep_their_numbers():
    model = Attention(24, 4, kv_heads=2, bias=Alibi(4), mask=Causal())
    with torch.no_grad(), capture(model, heads=[3, 1]) as tape:
        model(torch.randn(B, N, 24))
    at = slice(0, N), slice(0, N)
    for head in (0, 1):
        assert torch.equal(Stage(CPU).bring("x", tape[0], 1, head, None).block(*at), Head(tape[0], 1, head).block(*at))


def test_heads_leave_when_room_gets_short_and_terms_come_once():
    A = weights(some(B, H, N, D), some(B, 2, N, D), mask=Dense(some(B, 1, N, N) > 0.2))
    one = 2 * N * D * 4
    stage = Stage(CPU, room=2 * one)
    heads = [stage.bring(n, A, 0, n, None) for n in range(3)]
    assert stage.get(0) is None
    assert [stage.get(n) for n in (1, 2)] == heads[1:]
    assert stage.taken == 2 * one
    assert heads[1]._call.mask is heads[2]._call.mask
    stage.bring(1, A, 0, 1, None)  # again, with a map for example
    assert stage.taken == 2 * one


def test_without_a_device_nothing_moves():
    A = weights(some(B, H, N, D), some(B, H, N, D))
    stage = Stage()
    assert stage.bring("x", A, 1, 2, None)._call is A.call
    assert stage.taken == 0


@pytest.mark.parametrize("minus", [None, Chosen(0, 1, 0, 2)])
@pytest.mark.parametrize("head", [1, "mean", "max"])
def test_answers_from_a_device_are_the_same(desk, head, minus):
    model = nn.Sequential(*(Attention(24, H, mask=Causal()) for _ in range(2))).eval()
    with torch.no_grad(), capture(model) as tape:
        model(torch.randn(1, 300, 24))
    asked = 0, 0, 0, head, minus, 1, 0, 0
    here, there = (Answers([Capture(tape, "x")], desk, device).tile(*asked) for device in (None, CPU))
    assert here == there


def test_libraries_bring_each_head_once(desk):
    tape = Tape({("x", 0): weights(some(1, H, N, D), some(1, H, N, D))})
    library = Library([Capture(tape, "x")], desk, CPU)
    assert library.sheet(Chosen(0, 0, 0, 1)) is library.sheet(Chosen(0, 0, 0, 1))
    tape.summarize()  # now there is a map
    assert library.sheet(Chosen(0, 0, 0, 1)).stored() is not None


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_named(tmp_path, device):
    Tape({("x", 0): weights(some(1, H, N, D), some(1, H, N, D))}).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=rf"device must be one that PyTorch can use here, got '{device}'; write 'cpu'"):
        serve([tmp_path / "x.safetensors"], device=device, open_browser=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_tiles_of_a_gpu_are_exact_at_every_level(desk):
    q, k = torch.randn(2, 1, 2, 5000, 64, dtype=torch.bfloat16)
    library = Library([Capture(Tape({("x", 0): weights(q, k, mask=Causal())}), "x")], desk, torch.device("cuda"))
    sheet, truth = library.sheet(Chosen(0, 0, 0, 1)), Head(weights(q, k, mask=Causal()), 0, 1)
    assert sheet.device.type == "cuda"
    at = slice(0, 5000), slice(0, 5000)
    assert (sheet.block(*at).cpu() - truth.block(*at)).abs().max() < 1e-5

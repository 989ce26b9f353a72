"""Device cache: heads are copied to a device bit for bit, each row once, within a limit of bytes."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import Additive, Alibi, Causal, Dense, Padding, Sparsemax, weights
from regard.lens import Tape, capture
from regard.nn import Attention
from regard.views.viewer import device_cache
from regard.views.viewer.api import ViewerApi
from regard.views.viewer.captures import Library, MatrixId
from regard.views.viewer.describe import Capture
from regard.views.viewer.device_cache import DeviceCache, DeviceRows
from regard.views.viewer.matrix_view import HeadView
from regard.views.viewer.server import serve
from regard.views.viewer.worker import Worker

B, H, N, D = 2, 4, 37, 6
CPU = torch.device("cpu")


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def elsewhere(monkeypatch):
    """Let this device count as another: what is looked at is brought in small pieces, and all around is NaN."""
    monkeypatch.setattr(device_cache, "is_at", lambda A, device: False)
    monkeypatch.setattr(device_cache, "ROWS_PER_COPY", 8)
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


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


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("terms", CALLS)
def test_a_head_that_was_brought_is_that_head(elsewhere, terms, known):
    A = weights(some(B, H, N, D), some(B, H, N, D).roll(1, 2), **terms)
    if known:
        A.summary()
    for batch, head in ((0, 0), (1, 3)):
        brought, whole = DeviceCache(CPU).add("x", A, batch, head, None), HeadView(A, batch, head)
        at = slice(3, 30), slice(1, 33)
        assert torch.equal(brought.block(*at), whole.block(*at))
        rows = torch.tensor([30, 2, 7])
        assert torch.equal(brought.block(rows, slice(0, N)), whole.block(rows, slice(0, N)))


def test_heads_that_were_chosen_at_capture_keep_their_numbers(elsewhere):
    model = Attention(24, 4, kv_heads=2, bias=Alibi(4), mask=Causal())
    with torch.no_grad(), capture(model, heads=[3, 1]) as tape:
        model(torch.randn(B, N, 24))
    at = slice(0, N), slice(0, N)
    for head in (0, 1):
        assert torch.equal(
            DeviceCache(CPU).add("x", tape[0], 1, head, None).block(*at), HeadView(tape[0], 1, head).block(*at)
        )


def test_heads_leave_when_room_gets_short_and_so_do_the_terms_only_they_had(elsewhere):
    A, other = (
        weights(some(B, H, N, D), some(B, 2, N, D), mask=Dense(some(B, 1, N, N) > least)) for least in (0.2, 0.4)
    )
    one, term = 2 * N * D * 4, B * N * N
    room = DeviceCache(CPU, max_bytes=3 * one + term)
    heads = [room.add(n, A, 0, n, None) for n in range(4)]
    assert room.get(0) is None
    assert [room.get(n) for n in (1, 2, 3)] == heads[1:]
    assert room.used_bytes == 3 * one + term  # of one mask, which they share
    room.add(1, A, 0, 1, None)  # again, with a map for example
    assert room.used_bytes == 3 * one + term
    for n in range(4):
        room.add(("other", n), other, 0, n, None)
    assert room.used_bytes == 3 * one + term
    assert [room.get(n) for n in range(4)] == [None] * 4


@pytest.mark.parametrize("device", [None, CPU])
def test_nothing_moves_without_a_device_or_to_the_one_where_it_is(device):
    A = weights(some(B, H, N, D), some(B, H, N, D))
    still = DeviceCache(device)
    assert still.add("x", A, 1, 2, None)._call is A.call
    assert still.used_bytes == 0


class Read(TorchDispatchMode):
    """Counts the bytes of some tensors that are read, not merely looked at another way."""

    def __init__(self, tensors):
        super().__init__()
        self.sources, self.bytes = {x.untyped_storage().data_ptr() for x in tensors}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = {id(x) for x in tree_leaves(out) if self._of(x)}
        if not made:
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs)) if self._of(x))
        return out

    def _of(self, x):
        return isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in self.sources


@pytest.fixture
def long(worker):
    """The answers about a layer of 1,000 tokens, and its tensors."""
    A = weights(some(B, H, 1000, D), some(B, 2, 1000, D), mask=Causal())
    tape = Tape({("x", 0): A})
    tape.summarize()
    A = tape["x"]
    return ViewerApi([Capture(tape, "x")], worker, CPU), [A.call.q, A.call.k, A.known_statistic]


ROW = (D + D + 1) * 4  # bytes of a row of q, one of k, and its statistic


def test_a_tile_reads_its_rows_and_keys_and_reads_them_once(elsewhere, long):
    answers, tensors = long
    with Read(tensors) as read:
        answers.tile(0, 0, 1, 2, None, 0, 2, 1)
        assert read.bytes == 256 * ROW
        answers.tile(0, 0, 1, 2, None, 0, 2, 0)  # the same rows, other keys
        assert read.bytes == 256 * (ROW + D * 4)


def test_looking_everywhere_reads_a_head_once(elsewhere, long):
    answers, tensors = long
    with Read(tensors) as read:
        for level, tiles in ((2, 1), (1, 2), (0, 4)):
            for row in range(tiles):
                for col in range(tiles):
                    answers.tile(0, 0, 1, 2, None, level, row, col)
    assert read.bytes == 1000 * ROW


def test_what_a_mask_hides_is_not_read(elsewhere, long):
    answers, tensors = long
    with Read(tensors) as read:
        answers.tile(0, 0, 0, 0, None, 0, 0, 3)
    assert read.bytes == 0


def test_heads_together_read_no_more_than_each_of_them(elsewhere, long):
    answers, tensors = long
    with Read(tensors) as read:
        answers.tile(0, 0, 1, "mean", None, 0, 2, 1)
    assert read.bytes == H * 256 * ROW


def test_a_statistic_that_was_not_kept_takes_all_keys_but_only_its_rows(elsewhere):
    q, k = some(1, H, N, D), some(1, H, N, D).roll(1, 2)
    head = DeviceCache(CPU).add("x", weights(q, k), 0, 1, None)
    with Read([q, k]) as read:
        head.block(torch.tensor([3, 30]), slice(0, 4))
    assert read.bytes == (2 * 8 + N) * D * 4


@pytest.mark.parametrize("minus", [None, MatrixId(0, 1, 0, 2)])
@pytest.mark.parametrize("head", [1, "mean", "max"])
def test_answers_from_a_device_are_the_same(elsewhere, worker, head, minus):
    model = nn.Sequential(*(Attention(24, H, mask=Causal()) for _ in range(2))).eval()
    with torch.no_grad(), capture(model) as tape:
        model(torch.randn(1, 300, 24))
    asked = 0, 0, 0, head, minus, 1, 0, 0
    here, there = (ViewerApi([Capture(tape, "x")], worker, device).tile(*asked) for device in (None, CPU))
    assert here == there


def test_libraries_bring_each_head_once(elsewhere, worker):
    tape = Tape({("x", 0): weights(some(1, H, N, D), some(1, H, N, D))})
    library = Library([Capture(tape, "x")], worker, CPU)
    assert library.matrix_view(MatrixId(0, 0, 0, 1)) is library.matrix_view(MatrixId(0, 0, 0, 1))
    tape.summarize()  # now there is a map
    assert library.matrix_view(MatrixId(0, 0, 0, 1)).stored_map() is not None


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_named(tmp_path, device):
    Tape({("x", 0): weights(some(1, H, N, D), some(1, H, N, D))}).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=rf"device '{device}' is not available on this machine; write 'cpu'"):
        serve([tmp_path / "x.safetensors"], device=device, open_browser=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_tiles_of_a_gpu_are_exact_at_every_level(worker):
    q, k = torch.randn(2, 1, 2, 5000, 64, dtype=torch.bfloat16)
    library = Library([Capture(Tape({("x", 0): weights(q, k, mask=Causal())}), "x")], worker, torch.device("cuda"))
    view, truth = library.matrix_view(MatrixId(0, 0, 0, 1)), HeadView(weights(q, k, mask=Causal()), 0, 1)
    assert view.device.type == "cuda"
    at = slice(0, 5000), slice(0, 5000)
    assert (view.block(*at).cpu() - truth.block(*at)).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_blocks_on_a_gpu_wait_for_nothing_once_their_rows_are_there():
    q, k = torch.randn(2, 1, 2, 5000, 64, dtype=torch.bfloat16)
    A = weights(q, k, mask=Causal())
    A.summary()
    head, at = DeviceCache(torch.device("cuda")).add("x", A, 0, 1, None), (slice(0, 5000), slice(0, 5000))
    expected = head.block(*at)
    try:
        torch.cuda.set_sync_debug_mode("error")
        again = head.block(*at)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)


@pytest.mark.parametrize(
    ("rows", "copied"),
    [
        (slice(0, 0), []),
        (slice(5, 6), [4, 5, 6, 7]),
        (slice(3, 5), [0, 1, 2, 3, 4, 5, 6, 7]),
        (slice(8, 11), [8, 9, 10]),
        (torch.tensor([10, 1, 9]), [0, 1, 2, 3, 8, 9, 10]),
    ],
)
def test_the_chunks_that_hold_the_rows_are_copied(monkeypatch, rows, copied):
    monkeypatch.setattr(device_cache, "ROWS_PER_COPY", 4)
    source = torch.arange(1.0, 34.0).view(1, 1, 11, 3)
    buffer = DeviceRows(source, source.device)
    buffer.copied.zero_()
    buffer.fetch(rows)
    expected = torch.zeros_like(source)
    expected[:, :, copied] = source[:, :, copied]
    assert torch.equal(buffer.copied, expected)


def test_rows_are_copied_once(monkeypatch):
    monkeypatch.setattr(device_cache, "ROWS_PER_COPY", 4)
    source = torch.ones(1, 1, 11, 3)
    buffer = DeviceRows(source, source.device)
    buffer.fetch(slice(0, 11))
    source.zero_()
    buffer.fetch(slice(0, 11))
    assert bool((buffer.copied == 1).all())

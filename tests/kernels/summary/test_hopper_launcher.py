"""The launcher of the Hopper kernel: the calls it takes, its outputs, and keys as one matrix."""

from __future__ import annotations

import pytest
import torch

from regard.kernels.summary import hopper_launcher as kernel
from regard.kernels.tiles import Pattern

NAMES = ("entropy", "received", "max", "distance", "map")


def test_outputs_do_not_overlap_and_are_padded_by_a_tile(monkeypatch):
    monkeypatch.setattr(kernel, "zeros_for_next_kernel", lambda n, device: torch.zeros(n, device=device))
    shapes = {"received": (1, 2, 70), "map": (1, 2, 3, 4), "entropy": (1, 2, 64)}
    found = kernel._make_outputs(shapes, torch.device("cpu"), map_is_written=False)
    taken = {}
    for name, shape in shapes.items():
        x = getattr(found, name)
        assert x.shape == shape
        assert not x.any()
        assert not x._is_view()  # so that it may be written to where gradients flow
        first = x.data_ptr() // 4
        taken[name] = range(first, first + x.numel() + kernel.TILE_KEYS)
        assert x.data_ptr() % 16 == 0
        assert (x.storage_offset() + len(taken[name])) * 4 <= x.untyped_storage().nbytes()
    assert not set(taken["received"]) & set(taken["entropy"])
    assert found.map.untyped_storage().data_ptr() != found.entropy.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("takes", "d", "dtype", "sizes"),
    [
        (True, 64, torch.bfloat16, None),
        (True, 128, torch.float16, (8, 32)),
        (True, 64, torch.float16, (8, 8)),
        (True, 80, torch.bfloat16, None),
        (True, 256, torch.float16, None),
        (False, 40, torch.bfloat16, None),
        (False, 272, torch.bfloat16, None),
        (False, 64, torch.float32, None),
        (False, 64, torch.bfloat16, (4, 8)),
        (False, 64, torch.bfloat16, (8, 4)),
        (False, 64, torch.bfloat16, (12, 16)),
        (False, 64, torch.bfloat16, (None, 16)),
    ],
)
def test_is_supported(takes, d, dtype, sizes):
    assert kernel.is_supported(torch.zeros(1, 1, 9, d, dtype=dtype), sizes) is takes


COPIED = ("features apart", "off its bytes")


STORED = {
    "as they come": lambda b, g, n, d: torch.randn(b, g, n, d),
    "heads side by side": lambda b, g, n, d: torch.randn(b, n, g, d).transpose(1, 2),
    "beside values": lambda b, g, n, d: torch.randn(b, n, 2, g, d)[:, :, 0].transpose(1, 2),
    "some heads": lambda b, g, n, d: torch.randn(b, 2 * g, n, d)[:, :g],
    "part of a cache": lambda b, g, n, d: torch.randn(b, g, 3 * n, d)[:, :, n : 2 * n],
    "features apart": lambda b, g, n, d: torch.randn(b, g, d, n).transpose(2, 3),
    "off its bytes": lambda b, g, n, d: torch.randn(b * g * n * d + 1)[1:].view(b, g, n, d),
    "one for all": lambda b, g, n, d: torch.randn(1, g, n, d).expand(b, g, n, d),
}


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("stored", STORED)
def test_keys_as_matrix_addresses_every_head_in_any_memory_layout(stored, b, g):
    k = STORED[stored](b, g, 10, 64)
    matrix, (batch, head), side = kernel.keys_as_matrix(k)
    assert (matrix.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()) is (stored not in COPIED)
    assert matrix.stride(1) == 1
    assert matrix.stride(0) % 16 == matrix.data_ptr() % 16 == 0
    for m in range(b):
        for h in range(g):
            row = m * batch + h * head
            assert torch.equal(matrix[row : row + 10, h * side : h * side + 64], k[m, h])


def test_a_head_alone_has_no_columns_of_others_beside_it():
    k = torch.randn(2, 10, 3, 80, dtype=torch.bfloat16).transpose(1, 2)
    assert kernel.keys_as_matrix(k)[0].shape == (20, 240)
    matrix, (batch, head), side = kernel.keys_as_matrix(k, alone=True)
    assert (matrix.shape, batch, head, side) == ((60, 80), 30, 10, 0)
    assert torch.equal(matrix.view(2, 3, 10, 80), k)


@pytest.mark.parametrize(("n", "m"), [(5, 0), (0, 5)])
def test_without_queries_or_keys_all_measures_are_zero(n, m, monkeypatch):
    q, k = torch.ones(1, 2, n, 64, dtype=torch.bfloat16), torch.ones(1, 2, m, 64, dtype=torch.bfloat16)
    asked = {"want": frozenset(NAMES), "shape": (2, 3), "bin_sizes": (8, 8)}
    monkeypatch.setattr(torch, "empty", lambda sizes, **options: torch.full(sizes, float("nan"), **options))
    torch.set_default_dtype(torch.float64)  # what is asked for is float32 all the same
    try:
        found = kernel.summarize_hopper(q, k, torch.zeros(1, 2, n), scale=1.0, offset=0, pattern=Pattern(), **asked)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(measure.dtype == torch.float32 for measure in found if measure is not None)
    assert torch.equal(found.received, torch.zeros(1, 2, m))
    assert torch.equal(found.map, torch.zeros(1, 2, 2, 3))
    for measure in (found.entropy, found.max, found.distance):
        assert torch.equal(measure, torch.zeros(1, 2, n))

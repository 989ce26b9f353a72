"""Launches on a driver that launches nothing: a kernel is given by us what it is given by Triton.

Run by itself, for kernels that are compiled: `python -m tests.kernels.fake_launches`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

GIVEN: list[tuple[object, ...]] = []
ARGUMENTS = 9  # before them: the grid, the stream, the function and what profilers are told


class Utils:
    """A GPU large enough, that has loaded everything."""

    def load_binary(self, name, kernel, shared, device):
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}


class Driver:
    """Keeps what is launched."""

    utils = Utils()

    def launcher_cls(self, src, metadata):
        return lambda *given: GIVEN.append((src.fn.__name__, *given[:3], *given[ARGUMENTS:]))

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def kinds(launched):
    return [(x.dtype, x.shape) if isinstance(x, Tensor) else tiled(x) for x in launched]


def tiled(x):
    return (x.shape, x.strides, x.block_shape) if hasattr(x, "block_shape") else x


def main():
    """Launch twice, and compare."""
    driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

    from regard.kernels.additive_scores import additive_scores
    from regard.kernels.launch_cache import _cache
    from regard.kernels.merged_parts import merge_two
    from regard.kernels.row_divergences import Matrix, RowSums, divergence_gradients, row_divergences
    from regard.kernels.softmax import softmax
    from regard.kernels.summary.generic import summarize_generic, tile_config
    from regard.kernels.summary.hopper_launcher import summarize_hopper
    from regard.kernels.tiles import UNBOUNDED, Pattern
    from regard.kernels.weighted_products import product_by_rows

    q, k = (torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(2))
    half, lse = (q.detach().half(), k.detach().half()), torch.zeros(1, 2, 32)
    wide, wide_lse = torch.randn(2, 1, 2, 256, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 256)
    rounds = []
    for _ in range(2):
        s = additive_scores(q, k, torch.ones(16))
        s.backward(torch.ones_like(s))
        softmax(s.detach(), torch.float32)
        for dtype in (torch.bfloat16, torch.float32):
            merge_two(*wide, wide_lse, wide_lse, dtype)
        want = frozenset({"entropy", "received", "max", "distance"})
        summarize_generic(*half, lse, want=want, scale=0.25, offset=0, config=tile_config(16, torch.float16))
        product_by_rows(*half, lse, half[1], scale=0.25, offset=0)
        both = Matrix(*half, lse, 0.25, 0), Matrix(*half, lse, 0.5, 0)
        row_divergences("js", *both, one_pattern=True, with_sums=True)
        for by_keys in (False, True):
            sums = RowSums(lse, lse, lse)
            for dtypes in ((torch.float16, torch.float32), (torch.float16, None), (None, torch.float32)):
                divergence_gradients("js", *both, sums, one_pattern=True, by_keys=by_keys, out_dtypes=dtypes)
        for low in (0, -UNBOUNDED):
            mapped = {"want": want | {"map"}, "shape": (32, 32), "bin_sizes": (8, 8)}
            summarize_hopper(*wide, wide_lse, scale=0.25, offset=0, pattern=Pattern(low=low), **mapped)
        rounds.append([kinds(one) for one in GIVEN])
        GIVEN.clear()
    assert rounds[0] == rounds[1]
    print(len(_cache), "remembered:", ", ".join(one[0] for one in rounds[1]))


if __name__ == "__main__":
    main()

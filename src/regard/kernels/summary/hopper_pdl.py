"""Programmatic dependent launch (PDL) on Hopper GPUs: overlap a kernel with the memset before it.

A kernel launched with `launch_pdl` may start once every program of the previous kernel has ended or has called
`allow_next_kernel`. It sees the writes of the previous kernel after `wait_for_previous_kernel`. The memset in
`zeros_for_next_kernel` calls `allow_next_kernel` once all earlier work is done, so a kernel launched right after it
may read its inputs at once, and must wait only before it adds to the zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch_cache import launch

CLEARED_PER_PROGRAM = 4096  # numbers; the kernel has 4096 as a literal


@gluon.jit
def wait_for_previous_kernel():
    """Wait until the previous kernel is done and all its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allow_next_kernel():
    """Let the next kernel start, as far as this program is concerned."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _clear_kernel(OUT, n):
    wait_for_previous_kernel()
    allow_next_kernel()
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.program_id(0).to(gl.int64) * 4096 + gl.arange(0, 4096, layout=layout)
    gl.store(OUT + at, gl.zeros([4096], gl.float32, layout=layout), mask=at < n)


def zeros_for_next_kernel(n: int, device: torch.device) -> Tensor:
    """Return n float32 zeros that the kernel launched next adds to."""
    out = torch.empty(n, device=device, dtype=torch.float32)
    launch(_clear_kernel, (-(-n // CLEARED_PER_PROGRAM),), out, n, num_warps=4, launch_pdl=True)
    return out

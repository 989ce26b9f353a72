"""A kernel that begins while the one before it, which clears what it adds to, still runs; on a Hopper GPU.

Launched with `launch_pdl`, a kernel may begin once every program of the one before has ended, or has called
`let_next_begin`. What that one writes it sees after `wait_for_last`. `zeros` lets the next begin when all that came
before is done: a kernel launched right after it reads what it likes at once, and waits only before it adds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch_cache import launch

CLEARED = 4096  # numbers of a program; the kernel writes it out


@gluon.jit
def wait_for_last():
    """Until the kernel before is done, and all that it wrote can be seen."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_begin():
    """As far as this program is concerned, the kernel that follows may begin."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _clear(OUT, n):
    wait_for_last()
    let_next_begin()
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.program_id(0).to(gl.int64) * 4096 + gl.arange(0, 4096, layout=layout)
    gl.store(OUT + at, gl.zeros([4096], gl.float32, layout=layout), mask=at < n)


def zeros(n: int, device: torch.device) -> Tensor:
    """So many, for the kernel that is launched next."""
    out = torch.empty(n, device=device, dtype=torch.float32)
    launch(_clear, (-(-n // CLEARED),), out, n, num_warps=4, launch_pdl=True)
    return out

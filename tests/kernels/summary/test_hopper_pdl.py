"""Zeros for the next kernel: every number is cleared once, and the next kernel may start before that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from regard.kernels.summary import hopper_pdl
from tests.kernels.plain_python import Memory, dialect, plain_python

CLEARED = hopper_pdl.CLEARED_PER_PROGRAM


def run_program(program, memory, n):
    """Run one program of the kernel; return the instructions it gave besides its stores."""
    words = dialect(memory)
    instructions = []
    words.program_id = lambda axis: torch.tensor(program)
    words.inline_asm_elementwise = lambda text, *given, **options: instructions.append(text.partition(";")[0])
    plain_python(hopper_pdl, gl=words)._clear_kernel(0, n)
    return instructions


@pytest.mark.parametrize("n", [1, CLEARED - 1, CLEARED, 2 * CLEARED + 5])
def test_the_programs_of_a_launch_clear_n_numbers_and_no_more(n, monkeypatch):
    launched = []
    monkeypatch.setattr(hopper_pdl, "launch", lambda *given, **options: launched.append((given, options)))
    out = hopper_pdl.zeros_for_next_kernel(n, torch.device("cpu"))
    assert (out.shape, out.dtype) == ((n,), torch.float32)
    (((_, grid, given, count), options),) = launched
    assert given is out
    assert count == n
    assert options["launch_pdl"]
    memory = Memory(n + CLEARED, fill=1.0)
    for program in range(*grid):
        run_program(program, memory, n)
    assert torch.equal(memory.values, torch.cat((torch.zeros(n), torch.ones(CLEARED))))


def test_the_next_kernel_may_start_only_after_the_previous_one_is_done():
    assert run_program(0, Memory(CLEARED), 9) == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]


def test_the_instructions_are_those_of_ptx():
    given = []
    words = SimpleNamespace(int32=None, inline_asm_elementwise=lambda text, *rest, **options: given.append(options))
    plain = plain_python(hopper_pdl, gl=words)
    plain.wait_for_previous_kernel(), plain.allow_next_kernel()
    assert all(options["is_pure"] is False for options in given), (
        "the compiler would drop an instruction without effect"
    )

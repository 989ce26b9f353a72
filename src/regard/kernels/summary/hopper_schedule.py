"""How blocks of rows are split over the programs of the Hopper kernel, so that all processors finish together.

A GPU processor (SM) starts the next program when one ends. Long programs are launched first. Blocks that would be left
over at the end are shared: several programs each take a portion of the keys of one block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class WorkSplit(NamedTuple):
    """The number of programs per block: `to_first` for the first blocks, then `to_second`, then `to_rest`."""

    first: int  # how many blocks get `to_first` programs each
    to_first: int
    second: int  # how many blocks get `to_second` programs each
    to_second: int
    to_rest: int

    def programs(self, blocks: int) -> int:
        """Return the total number of programs for `blocks` blocks."""
        rest = blocks - self.first - self.second
        return self.first * self.to_first + self.second * self.to_second + rest * self.to_rest


@lru_cache(maxsize=64)
def split_even_blocks(blocks: int, at_once: int) -> WorkSplit:
    """Split blocks that take equally long; `at_once` programs run at a time.

    Each block gets one program, unless the last wave would leave many processors idle. Then the blocks of that wave
    are shared: first in large portions for most of the processors, then in small ones for those that finish early.
    """
    rest = blocks % at_once
    if rest > 0.9 * at_once or not rest:
        return WorkSplit(blocks, 1, 0, 1, 1)
    large = max(2, round(at_once / rest))
    small = min(8, max(large, round(at_once / rest * 10 / 3)))
    return WorkSplit(blocks - rest, 1, min(rest, at_once * 3 // 5 // large), large, small)


@lru_cache(maxsize=64)
def split_causal_blocks(blocks: int, at_once: int, places: int) -> WorkSplit:
    """Split the few blocks of a causal mask: the first take longest, the last see almost no keys.

    The longest would keep one processor busy after all others are done, so programs share them, at least eight key
    tiles each. `places` is the number of blocks per head.
    """
    first, second, rest = (min(max(1, round(n * at_once / blocks)), 8, max(1, places // 4)) for n in (4, 3, 1.2))
    return WorkSplit(blocks // 4, first, blocks // 4, second, rest)


@gluon.jit
def block_of_program(program, split):
    """Return the block a program works on, the portion of its keys it takes, and the number of portions."""
    block, of = program * 0, program * 0 + split.to_first
    if program >= split.first * split.to_first:
        program -= split.first * split.to_first
        block, of = block + split.first, of * 0 + split.to_second
        if program >= split.second * split.to_second:
            program -= split.second * split.to_second
            block, of = block + split.second, of * 0 + split.to_rest
    portion = program * 0
    if of > 1:
        program, portion = unsigned_divmod(program, of)
    return block + program, portion, of


@gluon.jit
def unsigned_divmod(x, y):
    """Return x // y and x % y for non-negative x and y, which takes half the instructions of a signed division."""
    times = (x.to(gl.uint32) // (x * 0 + y).to(gl.uint32)).to(gl.int32)  # y may be a compile-time 1
    return times, x - times * y


@gluon.jit
def serpentine_order(program, programs, processors):
    """Reverse the program order in every second wave, one program per processor a wave."""
    wave = program // processors
    size = gl.minimum(programs - wave * processors, processors)
    return gl.where(wave % 2 == 1, 2 * wave * processors + size - 1 - program, program)

"""How blocks of rows are dealt out to programs, so that the processors of a GPU are done at about one time.

A processor takes the next program when it is done with one. Long ones come first; of what would be left at the end,
programs share the keys of a block, each a portion of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Deal(NamedTuple):
    """How many blocks of rows come first, and how many programs each of them has; then others; then the rest."""

    first: int
    to_first: int
    second: int
    to_second: int
    to_rest: int

    def programs(self, blocks: int) -> int:
        """All of them."""
        rest = blocks - self.first - self.second
        return self.first * self.to_first + self.second * self.to_second + rest * self.to_rest


@lru_cache(maxsize=64)
def dealt_even(blocks: int, at_once: int) -> Deal:
    """Blocks that take equally long, a program each, but for a last round that would leave many processors idle.

    Its keys are dealt out: first in portions for a good part of what processors take at once, then in smaller ones for
    those that are done early.
    """
    rest = blocks % at_once
    if rest > 0.9 * at_once or not rest:
        return Deal(blocks, 1, 0, 1, 1)
    large = max(2, round(at_once / rest))
    small = min(8, max(large, round(at_once / rest * 10 / 3)))
    return Deal(blocks - rest, 1, min(rest, at_once * 3 // 5 // large), large, small)


@lru_cache(maxsize=64)
def dealt_long(blocks: int, at_once: int, places: int) -> Deal:
    """Blocks of which the first take longest, all there is to see, and the last next to nothing.

    The longest would keep a processor busy after all others are done: programs share them, eight tiles each at least.
    """
    first, second, rest = (min(max(1, round(n * at_once / blocks)), 8, max(1, places // 4)) for n in (4, 3, 1.2))
    return Deal(blocks // 4, first, blocks // 4, second, rest)


@gluon.jit
def block_of(program, deal):
    """Which block a program takes, or which portion of it, of how many."""
    block, of = program * 0, program * 0 + deal.to_first
    if program >= deal.first * deal.to_first:
        program -= deal.first * deal.to_first
        block, of = block + deal.first, of * 0 + deal.to_second
        if program >= deal.second * deal.to_second:
            program -= deal.second * deal.to_second
            block, of = block + deal.second, of * 0 + deal.to_rest
    portion = program * 0
    if of > 1:
        program, portion = divided(program, of)
    return block + program, portion, of


@gluon.jit
def divided(x, y):
    """How often y goes into x, and what is left; neither is negative, which takes half the instructions."""
    times = (x.to(gl.uint32) // (x * 0 + y).to(gl.uint32)).to(gl.int32)  # y may be a 1 known beforehand
    return times, x - times * y


@gluon.jit
def there_and_back(program, programs, processors):
    """The same programs, every other round of them, one for each processor, from behind."""
    round = program // processors
    size = gl.minimum(programs - round * processors, processors)
    return gl.where(round % 2 == 1, 2 * round * processors + size - 1 - program, program)

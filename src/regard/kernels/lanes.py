"""Sums over the lanes of a warp that go straight to memory, in PTX.

Each lane holds a value for each of `len(offsets)` places. Of two lanes that differ in one bit of their number, one
hands over half of its values and keeps the sums of the other half; the next bit halves them again. So n values are
summed in n - 1 exchanges, not in n for each bit, and no lane ends up with what another has too. When one value is left,
bits that remain are summed the plain way, and one lane of those that now agree writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


@cache
def summed_over_lanes(bits: Sequence[int], offsets: Sequence[int]) -> tuple[str, str]:
    """The assembly for an elementwise call with pack = len(offsets), and its constraints.

    `bits` are those of the lane's number to sum over, `offsets` how many floats past its pointer each value belongs.
    Operands are the values and, the same for all, the pointer; what it returns means nothing.
    """
    count = len(offsets)
    values, places = [f"${count + n}" for n in range(count)], list(offsets)
    text: list[str] = []
    made = alike = 0

    def new() -> str:
        nonlocal made
        made += 1
        return f"%v{made}"

    for n, bit in enumerate(bits):
        text.append(f"and.b32 %m, %lane, {bit};  setp.ne.u32 %p{n}, %m, 0;")
        half = len(values) // 2
        if half:
            sums = []
            for low, high in zip(values[:half], values[half:], strict=True):
                given, kept, total = new(), new(), new()
                text.append(f"selp.f32 {given}, {low}, {high}, %p{n};  selp.f32 {kept}, {high}, {low}, %p{n};")
                text.append(f"shfl.sync.bfly.b32 {given}, {given}, {bit}, 31, -1;  add.f32 {total}, {given}, {kept};")
                sums.append(total)
            text.append(f"@%p{n} add.u32 %o, %o, {4 * (places[half] - places[0])};")
            values, places = sums, places[:half]
        else:
            given, total = new(), new()
            text.append(f"shfl.sync.bfly.b32 {given}, {values[0]}, {bit}, 31, -1;")
            text.append(f"add.f32 {total}, {given}, {values[0]};")
            values, alike = [total], alike | bit
    text.append(f"cvt.u64.u32 %a, %o;  add.u64 %a, %a, ${2 * count};")
    text.append(f"and.b32 %m, %lane, {alike};  setp.eq.u32 %p7, %m, 0;")
    for value, place in zip(values, places, strict=True):
        text.append(f"@%p7 red.global.relaxed.gpu.add.f32 [%a + {4 * (place - places[0])}], {value};")
    text += [f"mov.u32 ${n}, 0;" for n in range(count)]
    declared = f".reg .pred %p<8>;  .reg .b32 %lane, %o, %m;  .reg .b64 %a;  .reg .f32 %v<{made + 1}>;"
    assembly = "\n".join(("{", declared, "mov.u32 %lane, %laneid;  mov.u32 %o, 0;", *text, "}"))
    return assembly, ",".join(["=r"] * count + ["f"] * count + ["l"] * count)

"""Cache bytes worked out one number at a time, in integers and exact fractions, without torch.

Written from the byte layouts alone: E4M3 and E2M1 by searching the nearest of all their values, scales by comparing
powers of two.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction


def bf16_bits(value: float) -> int:
    """Round to nearest even, as bits."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def bf16(value: float) -> float:
    return struct.unpack("<f", struct.pack("<I", bf16_bits(value) << 16))[0]


def f32(value: Fraction) -> Fraction:
    """The nearest float32 (struct rounds to nearest even)."""
    return Fraction(struct.unpack("<f", struct.pack("<f", float(value)))[0])


def _e4m3() -> list[Fraction]:
    found = []
    for code in range(0x7F):  # 0x7F is NaN
        exponent, mantissa = code >> 3, code & 7
        if exponent:
            found.append(Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7))
        else:
            found.append(Fraction(mantissa, 8) * Fraction(2) ** -6)
    return found


E4M3 = _e4m3()
E2M1 = [Fraction(half, 2) for half in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest(values: list[Fraction], size: Fraction) -> int:
    """Code of the nearest value, the even code of two equally near ones; the last one beyond the end."""
    above = bisect_left(values, size)
    if above == len(values):
        return above - 1
    if above == 0 or values[above] == size:
        return above
    left, right = size - values[above - 1], values[above] - size
    if left != right:
        return above if right < left else above - 1
    return above if above % 2 == 0 else above - 1


def power_above(value: Fraction) -> int:
    """The smallest e with 2**e >= value."""
    exponent = -200
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


def fp8(value: float, exponent: int) -> int:
    sign = 0x80 if struct.pack("<f", value)[3] & 0x80 else 0
    return sign | nearest(E4M3, abs(Fraction(value)) / Fraction(2) ** exponent)


def fp8_exponent(values: Sequence[float], scale_floor: bool) -> int:
    largest = max(abs(Fraction(value)) for value in values)
    floor = f32(Fraction("0.0001"))
    if scale_floor:
        return power_above(max(f32(largest / 448), floor))
    return power_above(f32(max(largest, floor) / 448))


def mla_state(row: Sequence[float], scale_floor: bool = False) -> tuple[bytes, bytes]:
    """448 FP8 bytes and 64 bf16 values; 7 scales and a zero."""
    rounded = [bf16(value) for value in row]
    data, scales = bytearray(), bytearray()
    for start in range(0, 448, 64):
        block = rounded[start : start + 64]
        exponent = fp8_exponent(block, scale_floor)
        data += bytes(fp8(value, exponent) for value in block)
        scales.append(exponent + 127)
    for value in row[448:]:
        data += struct.pack("<H", bf16_bits(value))
    return bytes(data), bytes(scales) + b"\0"


def indexer_fp8_key(row: Sequence[float]) -> tuple[bytes, bytes]:
    rounded = [bf16(value) for value in row]
    exponent = fp8_exponent(rounded, scale_floor=False)
    return bytes(fp8(value, exponent) for value in rounded), struct.pack("<f", 2.0**exponent)


def fp4_code(value: float, exponent: int) -> int:
    sign = 8 if struct.pack("<f", value)[3] & 0x80 else 0
    return sign | nearest(E2M1, abs(Fraction(value)) / Fraction(2) ** exponent)


def fp4_row(row: Sequence[float]) -> tuple[bytes, bytes]:
    """Packed E2M1, the even element low, and one UE8M0 byte per 32."""
    rounded = [bf16(value) for value in row]
    codes, scales = [], bytearray()
    for start in range(0, len(row), 32):
        block = rounded[start : start + 32]
        largest = max(max(abs(Fraction(value)) for value in block), 6 * Fraction(2) ** -126)
        exponent = max(-127, min(127, power_above(f32(largest / 6))))
        codes += [fp4_code(value, exponent) for value in block]
        scales.append(exponent + 127)
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)), bytes(scales)

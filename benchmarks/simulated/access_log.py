"""What logging and judging accesses costs per launch, on virtual memory.

*exact*: three accesses, each to a range that was accessed before. *layers*: four stages overlaid in one slab, an aux
stream forked and joined by events in each, sizes that change every 43 layers; a figure includes its share of the
records and waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.figure import Figure, interleaved_us, median_of
from workspace.simulated import Device

BATCHES = 15
LAYERS = 43
STAGES = 4
PER_STAGE = 5
LIMIT_US = 5.0
"""Target: the log may add this much to a launch."""


def figures() -> list[Figure]:
    """All figures of this benchmark."""
    found: list[Figure] = []
    for name, body, calls in (("exact", _exact, 1000), ("layers", _layers, LAYERS * STAGES * PER_STAGE)):
        bodies = [body(Device(memory="virtual", log=log, sites=sites)) for log, sites in
                  ((False, False), (True, False), (True, True))]  # fmt: skip
        times = interleaved_us(bodies, BATCHES, calls)
        bare, logged, sited = (median_of(times, index) for index in range(3))
        found.append(Figure(f"{name}: a launch, no log", bare, "us"))
        found.append(Figure(f"{name}: the log", logged - bare, "us", LIMIT_US))
        found.append(Figure(f"{name}: call sites", sited - logged, "us"))
    return found


def _exact(device: Device) -> Callable[[], None]:
    slab, stream = device.alloc(32 << 16), device.new_stream("main")
    ranges = [(slab.address + (index << 16), 1 << 16) for index in range(32)]

    def body() -> None:
        for index in range(1000):
            at = index % 10
            device.launch("op", (ranges[at], ranges[at + 1]), (ranges[at + 2],), stream=stream)
        assert slab.address

    return body


def _layers(device: Device) -> Callable[[], None]:
    slab, rows = device.alloc(64 << 20), random.Random(0)
    main, aux = device.new_stream("main"), device.new_stream("aux")
    forked, joined = device.new_event(), device.new_event()

    def body() -> None:
        stages = [_stage(slab.address, rows.randint(1, 4000), rows) for _ in range(STAGES)]
        for _ in range(LAYERS):
            for a, b, c, d in stages:
                device.launch("a", (), (a,), stream=main)
                device.record(forked, main)
                device.wait(forked, aux)
                device.launch("b", (a,), (b,), stream=main)
                device.launch("c", (a,), (c,), stream=aux)
                device.record(joined, aux)
                device.launch("d", (b,), (d,), stream=main)
                device.wait(joined, main)
                device.launch("e", (b, c, d), (), stream=main)

    return body


def _stage(base: int, tokens: int, rows: random.Random) -> list[tuple[int, int]]:
    ranges = []
    for _ in range(4):
        nbytes = tokens * rows.choice([256, 512, 1024, 2048])
        ranges.append((base, nbytes))
        base += nbytes
    return ranges

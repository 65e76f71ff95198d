"""Running a scenario: under adversarial schedules and at true sizes, whole or with one guard removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import attrs
import torch

from workspace.errors import WorkspaceError
from workspace.testing.bench import Bench, Corrupted
from workspace.testing.failure import ContractBroken
from workspace.testing.scenario import Evidence, Scenario
from workspace.testing.schedules import adversarial
from workspace.testing.seams import removed
from workspace.testing.simulated import SimulatedBench

STREAMS, SEEDS, ATTEMPTS = 4, 2, 3


@attrs.frozen
class Outcome:
    """One run of a scenario.

    Attributes
    ----------
    setting
        The schedule, or that sizes were true ones.
    failure
        Why the contract was broken, empty when it was kept.
    corrupted
        Whether bytes were wrong.
    verdict
        The clock check's at the end; ``UNKNOWN`` where nothing judges.
    judged
        Whether anything did.
    """

    setting: str
    failure: str
    corrupted: bool
    verdict: str
    judged: bool = True

    def __str__(self) -> str:
        return f"[{self.setting}] {self.failure or 'kept'} ({self.verdict})"


BenchMaker = Callable[[], Bench]


def benches(
    scenario: Scenario, strategy: str, driver: str = "simulated", control: bool = False
) -> Iterator[tuple[str, BenchMaker]]:
    """The benches a scenario runs on.

    On a GPU, one; for a control up to `ATTEMPTS`, with longer and longer delays. On the simulated device, real bytes
    under every schedule, judged; under some of them not judged, so that leases take the steady path that an access log
    keeps them from; and once at true sizes and counts, judged only.
    """
    if driver == "cuda":
        from workspace.testing.cuda import CudaBench

        for attempt in range(ATTEMPTS if control else 1):
            yield f"on a GPU, attempt {attempt + 1}", partial(CudaBench, strategy, control, stretch=2**attempt)
        return
    if scenario.real:
        for name, schedule in adversarial(STREAMS, SEEDS):
            yield name, lambda schedule=schedule: SimulatedBench(strategy, schedule())  # type: ignore[misc]
        if scenario.promise == "P":
            for name, schedule in adversarial(2, 1):
                yield (
                    f"{name}, unjudged",
                    lambda schedule=schedule: SimulatedBench(strategy, schedule(), judged=False),  # type: ignore[misc]
                )
    if scenario.virtual:
        yield "true sizes", lambda: SimulatedBench(strategy, None)


def run(scenario: Scenario, make: BenchMaker, setting: str) -> Outcome:
    """Run a scenario once, on a bench of its own."""
    bench = make()
    failure, corrupted = "", False
    try:
        with torch.no_grad(), bench.ws.on(bench.main):
            scenario.run(bench)
            bench.check()
            if not bench.detected:
                bench.no_race()
    except Corrupted as error:
        failure, corrupted = str(error), True
    except (ContractBroken, WorkspaceError) as error:
        failure = f"{type(error).__name__}: {error}"
    verdict = bench.verdict()
    bench.close()
    return Outcome(setting, failure, corrupted, verdict, bench.judged)


def outcomes(scenario: Scenario, strategy: str, driver: str = "simulated") -> list[Outcome]:
    """Every run of a scenario under a strategy."""
    return [run(scenario, make, setting) for setting, make in benches(scenario, strategy, driver)]


def check_scenario(scenario: Scenario, strategy: str, driver: str = "simulated") -> None:
    """Raise `ContractBroken` unless a strategy keeps a scenario in every run."""
    broken = [outcome for outcome in outcomes(scenario, strategy, driver) if outcome.failure]
    if broken:
        raise ContractBroken(f"{scenario.name} under {strategy!r}:\n  " + "\n  ".join(map(str, broken)))


def check_control(scenario: Scenario, strategy: str, seam: str, driver: str = "simulated") -> None:
    """Raise `ContractBroken` unless a scenario fails, as it says it must, with a guard removed."""
    found: list[Outcome] = []
    with removed(seam):
        for setting, make in benches(scenario, strategy, driver, control=True):
            found.append(run(scenario, make, setting))
            if shows(scenario.evidence, found):
                return
    raise ContractBroken(
        f"{scenario.name} under {strategy!r} shows no {scenario.evidence} without {seam!r}: it proves nothing\n  "
        + "\n  ".join(map(str, found))
    )


def shows(evidence: Evidence, found: list[Outcome]) -> bool:
    """Whether runs fail in the way a scenario says it must without a guard. A GPU shows bytes, and judges nothing."""
    unsafe = any(one.verdict == "UNSAFE" and one.failure for one in found)
    corrupted = any(one.corrupted for one in found)
    if evidence == "failure":
        return any(one.failure for one in found)
    if not any(one.judged for one in found):
        return corrupted
    return {"corruption": corrupted and unsafe, "bytes": corrupted, "race": unsafe}[evidence]

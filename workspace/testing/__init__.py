"""What a strategy, or an op that takes leases, is tested with: the contract suite and `leasecheck`."""

from workspace.testing.bench import Bench
from workspace.testing.failure import ContractBroken
from workspace.testing.leasecheck import LeaseCheckError, leasecheck
from workspace.testing.scenario import Scenario, all_scenarios
from workspace.testing.seams import SEAMS, removed
from workspace.testing.suite import Cell, Report, cells, run_contract
from workspace.testing.table import table

__all__ = [
    "SEAMS",
    "Bench",
    "Cell",
    "ContractBroken",
    "LeaseCheckError",
    "Report",
    "Scenario",
    "cells",
    "leasecheck",
    "removed",
    "run_contract",
    "all_scenarios",
    "table",
]

"""A device of virtual streams: runs, races and captures without a GPU."""

from workspace.simulated.buffer import Buffer
from workspace.simulated.device import Device
from workspace.simulated.driver import SimulatedDriver
from workspace.simulated.graph import SimulatedGraph
from workspace.simulated.late import LateAccess
from workspace.simulated.node import Node
from workspace.simulated.queue import NodeQueue
from workspace.simulated.race import Access, Race
from workspace.simulated.schedule import Directed, InOrder, Random, Schedule, StreamFirst
from workspace.simulated.streams import Stream
from workspace.simulated.virtual import VirtualTensor

__all__ = [
    "Access",
    "Buffer",
    "Device",
    "Directed",
    "InOrder",
    "LateAccess",
    "Node",
    "NodeQueue",
    "Race",
    "Random",
    "Schedule",
    "SimulatedDriver",
    "SimulatedGraph",
    "Stream",
    "StreamFirst",
    "VirtualTensor",
]

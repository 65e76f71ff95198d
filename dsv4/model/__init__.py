"""The whole decoder on the workspace interface: weights, stages, and the walk over `dsv4.topology`."""

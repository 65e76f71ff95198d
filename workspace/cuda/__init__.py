"""CUDA under the framework: the driver protocol on libcuda and torch. Importing it needs neither."""

from workspace.cuda.driver import CudaDriver, driver_of

__all__ = ["CudaDriver", "driver_of"]

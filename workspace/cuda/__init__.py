"""CUDA under the framework: the driver protocol on libcuda and torch. Importing it needs neither."""

from workspace.cuda.driver import CudaDriver, cuda_driver

__all__ = ["CudaDriver", "cuda_driver"]

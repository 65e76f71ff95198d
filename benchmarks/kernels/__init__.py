"""Speed of the CUDA kernels on a device, beside copies of the same bytes, and what a call costs the host."""

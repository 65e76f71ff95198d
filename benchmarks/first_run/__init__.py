"""The first measurements on a GPU, before the driver seam and the calling convention of ops are frozen."""

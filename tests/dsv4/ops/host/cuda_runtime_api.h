// What call.h and table.cpp take of CUDA, for a machine without it.
#pragma once

using cudaStream_t = struct CUstream_st*;
using cudaError_t = int;

inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaSetDevice(int) { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

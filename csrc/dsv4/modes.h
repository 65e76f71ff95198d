// Modes that want to see every op: fake tensors, tracing, whoever watches dispatches or functions.
#pragma once

namespace dsv4 {

// False where this PyTorch does not tell.
bool bind_modes();

// Whether any is active on this thread.
bool any_mode();

}  // namespace dsv4

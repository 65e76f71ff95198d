#include "modes.h"

#include <cstdint>

#include "private_symbol.h"

namespace dsv4 {
namespace {

// c10::impl::TorchDispatchModeTLS::stack_len() and at::impl::PythonTorchFunctionTLS::stack_len(), static both.
int64_t (*dispatch_modes)() = nullptr;
int64_t (*function_modes)() = nullptr;

}  // namespace

bool bind_modes() {
  dispatch_modes = private_symbol<int64_t()>("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
  function_modes = private_symbol<int64_t()>("libtorch_cpu.so", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv");
  return dispatch_modes && function_modes;
}

bool any_mode() { return dispatch_modes() > 0 || function_modes() > 0; }

}  // namespace dsv4

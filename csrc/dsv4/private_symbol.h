// Functions of PyTorch's that no header for extensions declares, looked up by name: where one is missing, Python does
// what it was for.
#pragma once
#include <dlfcn.h>

namespace dsv4 {

// Null where the library is not loaded, or has none.
template <class Function>
Function* private_symbol(const char* library, const char* name) {
  void* loaded = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  return loaded ? reinterpret_cast<Function*>(dlsym(loaded, name)) : nullptr;
}

}  // namespace dsv4

// The ops that have kernels.
#pragma once
#include "call.h"

namespace dsv4 {

// `signature` has one letter an argument of the schema: t tensor, o tensor or None, i integer, b bool, f float.
// `run` checks a call and launches it; with no tokens it launches nothing.
struct Op {
  const char* name;
  const char* signature;
  void (*run)(const Call&);
};

constexpr int kOpCount = 27;
// The last few are the fast face's only: what they do not take is Python's, which the dispatcher knows.
constexpr int kDispatchedCount = kOpCount - 3;
extern const Op kOps[kOpCount];

// Runs an op on the device of its first tensor.
void run(const Op& op, Call& call);

}  // namespace dsv4

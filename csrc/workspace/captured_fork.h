// Forks of a stream that captures.
#pragma once

#include "order.h"

namespace workspace {

inline bool is_holding(PyObject* one) { return PyObject_TypeCheck(one, parts.holding); }

// Whether two streams have one key; -1 with an exception set.
int same_key(const Ref& a, const Ref& b);

// What a fork in a capture goes from and to.
struct Captured {
  Ref parent, branches;
};

// The parent and the branches of a fork as they are inside the capture that the stream is part of. No parent where the
// Python form has to look, or refuses; an exception may be set.
Captured captured(Order& order, const Ref& stream, const Ref& branches, const Ref& held);

}  // namespace workspace

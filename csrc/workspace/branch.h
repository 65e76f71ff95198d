// Making a stream current for a ``with`` block.
#pragma once

#include "parts.h"

namespace workspace {

// Whether a stream is one that the timeline knows as it is; -1 with an exception set.
int known(const Ref& by_id, PyObject* stream);

Ref new_branch(const Ref& driver, Ref key);

}  // namespace workspace

// A change of dims the short way: `workspace.refit.refit`.
#pragma once

#include "parts.h"

namespace workspace {

// A block that waited for the request's layout at larger dims on the stream, now the request's; empty, without an
// exception, where there is none, or where the Python form has to look: then `ask` is true.
Ref refitted(const Ref& request, const Ref& timeline, const Ref& key, bool& ask);

}  // namespace workspace

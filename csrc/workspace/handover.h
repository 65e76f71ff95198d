// A fence the short way: `workspace.handover.hand_over`.
#pragma once

#include "parts.h"

namespace workspace {

// Whether a block is one that a lease takes as it is, with its tensors.
bool may_be_held(const Ref& block);

// `Request.keep` of a block that has the request's tensors, and the pool's note of the shelf. False with an exception
// set.
bool kept(const Ref& pool, const Ref& request, const Ref& stream, const Ref& block, const Ref& key);

// A block of the request that waited on another stream's shelf and now is the stream's; empty, without an exception,
// where the Python form has to look.
Ref handed_over(const Ref& request, const Ref& timeline, const Ref& key);

}  // namespace workspace

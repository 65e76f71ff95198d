#include "captured_fork.h"

namespace workspace {

namespace {

// Whether a lease is held that a capture would have to keep.
bool holds_eager(const Ref& held) {
  PyObject *one, *none;
  for (Py_ssize_t at = 0; PyDict_Next(held.get(), &at, &one, &none);) {
    if (!is_holding(one)) continue;
    if (parts.stream_.capture.get(parts.holding_.stream.get(Ref::of(one))).is(Py_None)) return true;
  }
  return false;
}

// Whether a stream may join a capture: 1, where it is part of it already 2, and 0 where the Python form has to refuse. -1
// with an exception set.
int may_join(Order& order, const Ref& capture, const Ref& parent, const Ref& stream) {
  const int same = same_key(stream, parent);
  if (same != 0) return same < 0 ? -1 : 0;
  const Ref own = order.capture_of(parts.stream_.key.get(stream));
  if (!own) return PyErr_Occurred() ? -1 : 0;
  if (own.is(Py_None)) return parts.stream_.capture.get(stream).is(Py_None) ? 1 : 2;
  return own.is(capture.get()) ? 2 : 0;
}

// A stream's self in a capture. Empty with an exception set.
Ref inside(const Ref& capture, const Ref& selves, const Ref& stream) {
  Ref found = item(selves, parts.stream_.key.get(stream));
  if (!found && !PyErr_Occurred()) found = call_method(names.stream, capture.get(), stream.get());
  return found;
}

}  // namespace

int same_key(const Ref& a, const Ref& b) {
  const Ref one = parts.stream_.key.get(a), other = parts.stream_.key.get(b);
  if (!one || !other) {
    PyErr_SetString(PyExc_TypeError, "a stream of the fork is none");
    return -1;
  }
  return PyObject_RichCompareBool(one.get(), other.get(), Py_EQ);
}

Captured captured(Order& order, const Ref& stream, const Ref& branches, const Ref& held) {
  const Ref captures = parts.timeline_.captures.get(order.timeline());
  if (!captures || !PyDict_CheckExact(captures.get()) || PyDict_GET_SIZE(captures.get()) == 0 ||
      !parts.timeline_.refusal.get(order.timeline()).is(Py_None)) {
    return Captured();
  }
  const Ref capture = order.capture_of(parts.stream_.key.get(stream));
  if (!capture || capture.is(Py_None)) return Captured();
  const Ref selves = attribute(capture, names._streams);
  Ref parent = selves ? item(selves, parts.stream_.key.get(stream)) : Ref();
  const Py_ssize_t count = PyTuple_GET_SIZE(branches.get());
  Ref all(PyTuple_New(count));
  if (!parent || !all) return Captured();
  unsigned long long joins = 0;  // by branch
  for (Py_ssize_t index = 0; index < count; ++index) {
    const int may = may_join(order, capture, parent, Ref::of(PyTuple_GET_ITEM(branches.get(), index)));
    if (may <= 0 || index >= 64) return Captured();
    if (may == 1) joins |= 1ULL << index;
  }
  for (Py_ssize_t index = 0; index < count; ++index) {
    const Ref branch = Ref::of(PyTuple_GET_ITEM(branches.get(), index));
    // Its uses so far get an event first: while a stream captures, nothing outside can record on it.
    if ((joins >> index & 1) && !order.record(branch)) return Captured();
    Ref self = inside(capture, selves, branch);
    if (!self) return Captured();
    PyTuple_SET_ITEM(all.get(), index, self.release());
  }
  if (holds_eager(held) && !call_method(names.keep_held, capture.get())) return Captured();
  return Captured{std::move(parent), std::move(all)};
}

}  // namespace workspace

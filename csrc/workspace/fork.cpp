// Forks.

#include "branch.h"
#include "captured_fork.h"
#include "methods.h"
#include "order.h"

namespace workspace {

namespace {

enum { FORK, ENTER, CALL, EXIT };

bool is_lease(PyObject* one) { return PyObject_TypeCheck(one, parts.lease); }

PyObject* fork(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Native& native = fork_methods[FORK];
  const Ref timeline(PyObject_GetAttr(self, names.timeline));
  if (!timeline) return nullptr;
  if (!Py_IS_TYPE(timeline.get(), parts.timeline) || !parts.inlined.intact()) {
    return python(native, self, arguments, count);
  }
  const Ref by_id = parts.timeline_.by_id.get(timeline);
  Ref streams(PyTuple_New(count));
  if (!streams) return nullptr;
  for (Py_ssize_t index = 0; index < count; ++index) {
    const int is_known = known(by_id, arguments[index]);
    if (is_known < 0) return nullptr;
    if (!is_known) return python(native, self, arguments, count);
    PyTuple_SET_ITEM(streams.get(), index, Py_NewRef(arguments[index]));
  }
  Ref made(parts.fork->tp_alloc(parts.fork, 0));
  if (!made) return nullptr;
  parts.fork_.timeline.set(made.get(), Ref::of(timeline.get()));
  parts.fork_.branches.set(made.get(), std::move(streams));
  parts.fork_.parent.set(made.get(), Ref::of(Py_None));
  return made.release();
}

// -- entering -----------------------------------------------------------------------------------------------
// Notes the leases that the branches may use, among what the thread holds, and stands behind them.
bool enclose(PyObject* self, const Ref& held, const Ref& parent) {
  Ref flagged(PyList_New(0)), foreign(PyList_New(0));
  const Ref all(PyDict_Keys(held.get()));
  if (!flagged || !foreign || !all) return false;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(all.get()); ++index) {
    PyObject* const one = PyList_GET_ITEM(all.get(), index);
    if (!is_holding(one)) continue;
    if (is_lease(one)) {
      if (parts.lease_.state.holds(one, parts.plain)) {
        parts.lease_.state.set(one, Ref::of(parts.forked));
        if (PyList_Append(flagged.get(), one)) return false;
      }
    } else {
      const Ref told = call_method(names.forked, one);
      const int end = told ? PyObject_IsTrue(told.get()) : -1;
      if (end < 0 || (end && PyList_Append(flagged.get(), one))) return false;
    }
    if (!parts.holding_.stream.holds(one, parent.get()) && PyList_Append(foreign.get(), one)) return false;
  }
  parts.fork_.held.set(self, Ref::of(held.get()));
  parts.fork_.elsewhere.set(self, Ref::of(Py_None));
  parts.fork_.flagged.set(self, std::move(flagged));
  parts.fork_.foreign.set(self, std::move(foreign));
  return PyDict_SetItem(held.get(), self, Py_None) == 0;
}

// Whether a fork of `parent` is the plain case: no branch is the parent, nothing captures. -1 with an exception set.
int plain(const Ref& timeline, const Ref& parent, const Ref& branches) {
  if (!steady(timeline) || !parts.stream_.capture.get(parent).is(Py_None)) return 0;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(branches.get()); ++index) {
    const int same = same_key(Ref::of(PyTuple_GET_ITEM(branches.get(), index)), parent);
    if (same != 0) return same < 0 ? -1 : 0;
  }
  return 1;
}

PyObject* enter(PyObject* self, PyObject*) {
  const Native& native = fork_methods[ENTER];
  const Ref timeline = parts.fork_.timeline.get(self);
  Ref branches = parts.fork_.branches.get(self);
  if (!parts.fork_.parent.holds(self, Py_None) || !timeline || !branches || !PyTuple_Check(branches.get()) ||
      !Py_IS_TYPE(timeline.get(), parts.timeline) || !parts.inlined.intact()) {
    return python(native, self, nullptr, 0);
  }
  Order order(timeline);
  const Ref held = held_of(timeline);
  if (!held) return nullptr;
  Locked locked(timeline);
  if (!locked) return nullptr;
  Ref parent = order ? order.current() : Ref();
  if (!parent && PyErr_Occurred()) return nullptr;
  const int is_plain = parent && PyDict_Check(held.get()) ? plain(timeline, parent, branches) : 0;
  if (is_plain < 0) return nullptr;
  if (!is_plain) {
    Captured found = parent && PyDict_Check(held.get()) ? captured(order, parent, branches, held) : Captured();
    if (PyErr_Occurred()) return nullptr;
    if (!found.parent) return locked.unlock() ? python(native, self, nullptr, 0) : nullptr;
    parent = std::move(found.parent);
    branches = std::move(found.branches);
    parts.fork_.branches.set(self, Ref::of(branches.get()));
  }
  const Ref event = order.record(parent);
  if (!event) return nullptr;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(branches.get()); ++index) {
    if (!order.wait(event, Ref::of(PyTuple_GET_ITEM(branches.get(), index)))) return nullptr;
  }
  parts.fork_.parent.set(self, Ref::of(parent.get()));
  if (!locked.unlock() || !enclose(self, held, parent)) return nullptr;
  return Py_NewRef(self);
}

PyObject* branch_on(PyObject* self, PyObject* stream) {
  const Ref driver = parts.timeline_.driver.get(parts.fork_.timeline.get(self));
  Ref key = parts.stream_.key.get(Ref::of(stream));
  if (!driver || !key) {
    PyErr_SetString(PyExc_TypeError, "the fork has no driver, or the stream no key");
    return nullptr;
  }
  return new_branch(driver, std::move(key)).release();
}

// Whether the branch is one of the fork's own thread and micro-batch. False with or without an exception set.
bool at_home(PyObject* self) {
  const Ref held = parts.fork_.held.get(self), present = held_of(parts.fork_.timeline.get(self));
  return held && present && held.is(present.get());
}

PyObject* branch(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  const Native& native = fork_methods[CALL];
  const Ref branches = parts.fork_.branches.get(self);
  const bool entered = count == 1 && keywords == nullptr && branches && PyTuple_Check(branches.get()) &&
                       !parts.fork_.parent.holds(self, Py_None) && parts.inlined.intact() && at_home(self);
  if (PyErr_Occurred()) return nullptr;
  if (entered) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(branches.get()); ++index) {
      if (PyTuple_GET_ITEM(branches.get(), index) != arguments[0]) continue;
      return branch_on(self, arguments[0]);
    }
    // In a capture the branches are the streams' selves there, which the caller does not know.
    const int is_known = known(parts.timeline_.by_id.get(parts.fork_.timeline.get(self)), arguments[0]);
    for (Py_ssize_t index = 0; is_known == 1 && index < PyTuple_GET_SIZE(branches.get()); ++index) {
      const int same = same_key(Ref::of(PyTuple_GET_ITEM(branches.get(), index)), Ref::of(arguments[0]));
      if (same != 0) return same < 0 ? nullptr : branch_on(self, arguments[0]);
    }
    if (is_known < 0) return nullptr;
  }
  return python(native, self, arguments, count, keywords);
}

// -- leaving ------------------------------------------------------------------------------------------------
// What stands behind `mark` among the keys: leases and footprints when `holdings`, else forks.
Ref behind(const Ref& keys, PyObject* mark, bool holdings) {
  Ref found(PyList_New(0));
  bool passed = false;
  for (Py_ssize_t index = 0; found && index < PyList_GET_SIZE(keys.get()); ++index) {
    PyObject* const one = PyList_GET_ITEM(keys.get(), index);
    if (passed && is_holding(one) == holdings && PyList_Append(found.get(), one)) return Ref();
    passed = passed || one == mark;
  }
  return found;
}

bool among(const Ref& list, PyObject* one) {
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(list.get()); ++index) {
    if (PyList_GET_ITEM(list.get(), index) == one) return true;
  }
  return false;
}

// Leases of other streams than the parent that were held when the fork began and have not been let go since.
Ref still_held(const Ref& foreign, const Ref& held, const Ref& inside) {
  Ref found(PyList_New(0));
  for (Py_ssize_t index = 0; found && foreign && index < PyList_GET_SIZE(foreign.get()); ++index) {
    PyObject* const one = PyList_GET_ITEM(foreign.get(), index);
    const int is_held = PyDict_Contains(held.get(), one);
    if (is_held < 0) return Ref();
    if (is_held && !among(inside, one) && PyList_Append(found.get(), one)) return Ref();
  }
  return found;
}

// Whether an open fork around a lease declares `parent` for it; -1 with an exception set.
int encloses(const Ref& held, PyObject* lease, const Ref& parent) {
  const Ref keys(PyDict_Keys(held.get()));
  const Ref forks = keys ? behind(keys, lease, false) : Ref();
  if (!forks) return -1;
  const Ref own = parts.holding_.stream.get(lease);
  const Ref capture = parts.stream_.capture.get(own), capture_of_parent = parts.stream_.capture.get(parent);
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(forks.get()); ++index) {
    PyObject* const fork = PyList_GET_ITEM(forks.get(), index);
    const Ref branches = parts.fork_.branches.get(Ref::of(fork));
    if (!branches || !PyTuple_Check(branches.get())) continue;
    if (own.is(parent.get()) || !capture_of_parent.is(capture.get())) continue;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(branches.get()); ++at) {
      if (PyTuple_GET_ITEM(branches.get(), at) == parent.get()) return 1;
    }
  }
  return 0;
}

// The parent waits for a branch, and leases of other streams than the parent's hear of it. False with an exception set.
bool join(Order& order, const Ref& held, const Ref& stream, const Ref& parent, const Ref& foreign) {
  const Ref epoch = order.epoch(stream);
  const Ref event = epoch ? order.record(stream) : Ref();
  if (!event || !order.wait(event, parent)) return false;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(foreign.get()); ++index) {
    PyObject* const lease = PyList_GET_ITEM(foreign.get(), index);
    const int goes_along = encloses(held, lease, parent);
    if (goes_along < 0) return false;
    if (!goes_along && !call_method(names.joined, lease, stream.get(), epoch.get())) return false;
  }
  return true;
}

// The other branches are joined all the same, and the error of the body is the one that arrives. False with an
// exception set: it is none of this library's.
bool note_failure(Ref& error, const Ref& stream) {
  if (!PyErr_ExceptionMatches(parts.workspace_error)) return false;
  Ref failed = taken_error();
  if (!error) {
    error = std::move(failed);
    return true;
  }
  const Ref note(PyUnicode_FromFormat("joining %R failed too: %S", stream.get(), failed.get()));
  return note && call_method(names.add_note, error.get(), note.get());
}

bool unflag(const Ref& flagged) {
  for (Py_ssize_t index = 0; flagged && index < PyList_GET_SIZE(flagged.get()); ++index) {
    PyObject* const one = PyList_GET_ITEM(flagged.get(), index);
    if (!is_lease(one)) {
      if (!call_method(names.unforked, one)) return false;
    } else if (parts.lease_.state.holds(one, parts.forked)) {
      parts.lease_.state.set(one, Ref::of(parts.plain));
    }
  }
  return true;
}

// Leases acquired inside and still held may be used by the parent from now on.
bool declare(const Ref& inside, const Ref& parent) {
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(inside.get()); ++index) {
    PyObject* const lease = PyList_GET_ITEM(inside.get(), index);
    if (parts.holding_.stream.holds(lease, parent.get())) continue;
    if (!call_method(names.declare, lease, parent.get())) return false;
  }
  return true;
}

// How far the joins of a fork have come: the branches tried, those of them that were not joined, and the error.
struct Joins {
  Py_ssize_t tried = 0;
  Ref failed, error;
};

// Tries every branch. False with an exception set that is none of this library's: the rest was not tried.
bool join_all(Order& order, const Ref& held, const Ref& branches, const Ref& parent, const Ref& foreign, Joins& joins) {
  for (; joins.tried < PyTuple_GET_SIZE(branches.get()); ++joins.tried) {
    const Ref stream = Ref::of(PyTuple_GET_ITEM(branches.get(), joins.tried));
    if (join(order, held, stream, parent, foreign)) continue;
    if (!note_failure(joins.error, stream)) return false;
    if (!joins.failed) joins.failed = Ref(PyList_New(0));
    if (!joins.failed || PyList_Append(joins.failed.get(), stream.get())) return false;
  }
  return true;
}

// Leaves a fork of which a branch was not joined, by the Python form. False with an exception set.
bool leave_unjoined(PyObject* self, const Ref& branches, const Ref& inside, const Ref& parent, const Joins& joins) {
  const Ref unjoined(PySequence_List(branches.get()));
  if (!unjoined || PyList_SetSlice(unjoined.get(), 0, joins.tried, joins.failed.get())) return false;
  return static_cast<bool>(call_method(names._leave, self, unjoined.get(), inside.get(), parent.get()));
}

PyObject* leave(PyObject* self, const Ref& timeline, const Ref& held, PyObject* kind, PyObject* raised) {
  Order order(timeline);
  const Ref keys(PyDict_Keys(held.get()));
  const Ref inside = keys ? behind(keys, self, true) : Ref();
  if (!inside) return nullptr;
  const Ref parent = parts.fork_.parent.exchange(self, Ref::of(Py_None));
  const Ref branches = parts.fork_.branches.get(self), flagged = parts.fork_.flagged.get(self);
  const Ref foreign = still_held(parts.fork_.foreign.get(self), held, inside);
  if (!foreign) return nullptr;
  Joins joins;
  if (raised != Py_None) joins.error = Ref::of(raised);
  bool left = false;
  {
    // Until the end it is among what the thread holds, so that a release anywhere counts its branches.
    Locked locked(timeline);
    left = locked && join_all(order, held, branches, parent, foreign, joins) && !joins.failed &&
           declare(inside, parent) && !PyDict_DelItem(held.get(), self) && locked.unlock() && unflag(flagged);
  }
  if (!left) {
    Ref other = taken_error();
    if (!leave_unjoined(self, branches, inside, parent, joins)) return nullptr;
    if (other) joins.error = std::move(other);
  }
  if (joins.error && (kind == Py_None || !joins.error.is(raised))) {
    raise(std::move(joins.error));
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Whether the capture that a fork was entered in has ended, or one may have begun since that its streams are part of. An
// exception may be set.
bool crosses_capture(const Ref& timeline, const Ref& parent) {
  const Ref capture = parts.stream_.capture.get(parent);
  if (!capture || capture.is(Py_None)) {
    const Ref captures = parts.timeline_.captures.get(timeline);
    return !parts.timeline_.busy.get(timeline).is(Py_False) && captures && PyObject_IsTrue(captures.get()) != 0;
  }
  const Ref open = attribute(capture, names.open);
  return !open.is(Py_True);
}

PyObject* exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Native& native = fork_methods[EXIT];
  const Ref timeline = parts.fork_.timeline.get(self), held = parts.fork_.held.get(self);
  const Ref branches = parts.fork_.branches.get(self);
  const bool entered = count == 3 && timeline && held && PyDict_Check(held.get()) && branches &&
                       PyTuple_Check(branches.get()) && !parts.fork_.parent.holds(self, Py_None) &&
                       parts.fork_.elsewhere.holds(self, Py_None) && parts.inlined.intact() &&
                       !crosses_capture(timeline, parts.fork_.parent.get(self));
  if (PyErr_Occurred()) return nullptr;
  if (!entered || !Py_IS_TYPE(timeline.get(), parts.timeline)) return python(native, self, arguments, count);
  return leave(self, timeline, held, arguments[0], arguments[1]);
}

}  // namespace

Native fork_methods[] = {
    {"Workspace", {"fork", WORKSPACE_FUNCTION(fork), METH_FASTCALL, nullptr}, nullptr},
    {"Fork", {"__enter__", enter, METH_NOARGS, nullptr}, nullptr},
    {"Fork", {"__call__", WORKSPACE_FUNCTION(branch), METH_FASTCALL | METH_KEYWORDS, nullptr}, nullptr},
    {"Fork", {"__exit__", WORKSPACE_FUNCTION(exit), METH_FASTCALL, nullptr}, nullptr},
    {nullptr, {}, nullptr},
};

}  // namespace workspace

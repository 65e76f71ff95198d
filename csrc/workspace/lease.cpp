// `Workspace.lease`, and the acquire and release of leases that one stream keeps to itself.

#include <algorithm>
#include <memory>
#include <new>

#include "clock.h"
#include "handover.h"
#include "methods.h"
#include "refit.h"

namespace workspace {

namespace {

enum { LEASE, ENTER, EXIT };

// Whether the dims of a call are those of a request; -1 with an exception set.
int same_dims(const Ref& dims, PyObject* const* values, PyObject* keywords) {
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  if (!dims || !PyDict_Check(dims.get()) || PyDict_GET_SIZE(dims.get()) != count) return 0;
  for (Py_ssize_t index = 0; index < count; ++index) {
    if (!PyLong_CheckExact(values[index])) return 0;  // equal to an integer it may be: the Python form refuses it
    const Ref known = item(dims, Ref::of(PyTuple_GET_ITEM(keywords, index)));
    if (!known) return PyErr_Occurred() ? -1 : 0;
    const int equal = PyObject_RichCompareBool(known.get(), values[index], Py_EQ);
    if (equal <= 0) return equal;
  }
  return 1;
}

PyObject* lease(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  const Native& native = lease_methods[LEASE];
  if (count != 1 || !PyObject_TypeCheck(arguments[0], parts.layout)) {
    return python(native, self, arguments, count, keywords);
  }
  const Ref request = parts.layout_.latest.get(arguments[0]);
  if (!request || request.is(Py_None)) return python(native, self, arguments, count, keywords);
  const Ref key(PyObject_GetAttr(self, names._key));
  if (!key) return nullptr;
  const int known =
      parts.request_.key.get(request).is(key.get())
          ? same_dims(parts.request_.dims.get(request), arguments + count, keywords)
          : 0;
  if (known < 0) return nullptr;
  if (!known) return python(native, self, arguments, count, keywords);
  const Ref type = parts.request_.lease_type.get(request);
  if (!type || !PyType_Check(type.get()) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.get()), parts.lease)) {
    return python(native, self, arguments, count, keywords);
  }
  auto* const made = reinterpret_cast<PyTypeObject*>(type.get());
  Ref lease(made->tp_alloc(made, 0));
  if (!lease) return nullptr;
  parts.lease_.request.set(lease.get(), Ref::of(request.get()));
  parts.lease_.workspace.set(lease.get(), Ref::of(self));
  parts.lease_.state.set(lease.get(), Ref::of(parts.idle));
  return lease.release();
}

// Key of the stream that the lease is acquired on, where it may take a block by itself; empty without an exception
// where it may not.
Ref stream_of(PyObject* self, const Ref& timeline) {
  if (!parts.lease_.state.holds(self, parts.idle) || !timeline || !steady(timeline)) return Ref();
  if (quiet() <= 0) return Ref();
  const Ref ask = parts.timeline_.current_key.get(timeline);
  return ask ? call(ask) : Ref();
}

// The block that was released last to a shelf; empty without an exception where there is none.
Ref taken(const Ref& shelf) {
  if (!shelf || !PyList_Check(shelf.get())) return Ref();
  // From here on no Python runs, which makes it atomic.
  const Py_ssize_t last = PyList_GET_SIZE(shelf.get()) - 1;
  if (last < 0) return Ref();
  Ref block = Ref::of(PyList_GET_ITEM(shelf.get(), last));
  if (!may_be_held(block) || PyList_SetSlice(shelf.get(), last, last + 1, nullptr)) return Ref();
  return block;
}

PyObject* enter(PyObject* self, PyObject*) {
  const Native& native = lease_methods[ENTER];
  const Ref request = parts.lease_.request.get(self);
  if (!request) return python(native, self, nullptr, 0);
  const Ref timeline = parts.request_.timeline.get(request);
  const Ref key = stream_of(self, timeline);
  if (!key) return PyErr_Occurred() ? nullptr : python(native, self, nullptr, 0);
  const Ref held = held_of(timeline);
  if (!held) return nullptr;
  const Ref shelf = item(parts.request_.ready.get(request), key);
  Ref block = taken(shelf);
  bool ask = false;
  if (!block && !PyErr_Occurred()) block = refitted(request, timeline, key, ask);
  if (!block && !ask && !PyErr_Occurred()) block = handed_over(request, timeline, key);
  if (!block) return PyErr_Occurred() ? nullptr : python(native, self, nullptr, 0);
  const Ref first = parts.block_.first.get(block);
  parts.lease_.t0.set(self, Ref::of(PyTuple_GET_ITEM(first.get(), 0)));
  parts.lease_.t1.set(self, Ref::of(PyTuple_GET_ITEM(first.get(), 1)));
  parts.lease_.t2.set(self, Ref::of(PyTuple_GET_ITEM(first.get(), 2)));
  parts.holding_.stream.set(self, parts.block_.stream.get(block));
  parts.lease_.block.set(self, std::move(block));
  parts.lease_.state.set(self, Ref::of(parts.plain));
  parts.holding_.held.set(self, Ref::of(held.get()));
  if (PyDict_SetItem(held.get(), self, Py_None)) return nullptr;
  return Py_NewRef(self);
}

// Whether the slots hold what was lent: an assignment to one cannot be refused.
bool unchanged(PyObject* self, const Ref& block) {
  PyObject* const first = parts.block_.first.peek(block.get());
  if (first == nullptr || !PyTuple_CheckExact(first) || PyTuple_GET_SIZE(first) != 3) return false;
  return parts.lease_.t0.holds(self, PyTuple_GET_ITEM(first, 0)) &&
         parts.lease_.t1.holds(self, PyTuple_GET_ITEM(first, 1)) &&
         parts.lease_.t2.holds(self, PyTuple_GET_ITEM(first, 2));
}

PyObject* exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Native& native = lease_methods[EXIT];
  // Released by an error, it looks at what became of its tensors.
  if (!parts.lease_.state.holds(self, parts.plain) || count != 3 || arguments[0] != Py_None) {
    return python(native, self, arguments, count);
  }
  const Ref block = parts.lease_.block.get(self);
  const Ref stream = parts.block_.stream.get(block), shelf = parts.block_.shelf.get(block);
  const Ref held = parts.holding_.held.get(self);
  PyObject* const clock = stream ? parts.stream_.clock.get(stream).get() : nullptr;
  if (!Clock::is_one(clock) || !shelf || !PyList_Check(shelf.get()) || !held || !PyDict_Check(held.get()) ||
      !unchanged(self, block)) {
    return python(native, self, arguments, count);
  }
  Ref epoch(PyLong_FromLongLong(Clock::of(clock)->epoch));
  if (!epoch) return nullptr;
  parts.block_.epoch.set(block.get(), std::move(epoch));
  // The block's own list keeps the tensors.
  const Ref t0 = parts.lease_.t0.exchange(self, Ref()), t1 = parts.lease_.t1.exchange(self, Ref());
  const Ref t2 = parts.lease_.t2.exchange(self, Ref());
  parts.lease_.state.set(self, Ref::of(parts.idle));
  if (PyDict_DelItem(held.get(), self)) return nullptr;
  if (PyList_Append(shelf.get(), block.get())) return nullptr;
  Py_RETURN_NONE;
}

PyObject* address(PyObject* self, void*) {
  const Ref block = is_held(self) ? parts.lease_.block.get(self) : Ref();
  if (block.is(Py_None)) return PyLong_FromLong(0);
  const Ref request = parts.lease_.request.get(self);
  const Ref numbers[] = {
      parts.slab_.address.get(parts.block_.slab.get(block)), parts.block_.offset.get(block),
      parts.request_.lead.get(request), parts.request_.align.get(request)};
  for (const Ref& number : numbers) {
    if (!number || !parts.inlined.intact()) return call(python_address, self).release();
  }
  long long value[4];
  for (int index = 0; index < 4; ++index) {
    value[index] = PyLong_AsLongLong(numbers[index].get());
    if (value[index] == -1 && PyErr_Occurred()) return nullptr;
  }
  const long long end = value[0] + value[1] + value[2], align = value[3];
  return PyLong_FromLongLong((end + align - 1) / align * align);
}

}  // namespace

PyGetSetDef lease_address = {"address", address, nullptr, "First byte of the lease's block.", nullptr};
PyObject* python_address = nullptr;

int quiet() {
  for (PyObject* const asked : {parts.modes, parts.grad_enabled}) {
    const Ref found(PyObject_CallNoArgs(asked));
    const int none = found ? PyObject_Not(found.get()) : -1;
    if (none <= 0) return none;
  }
  return 1;
}

bool is_held(PyObject* lease) {
  const Ref state = parts.lease_.state.get(lease);
  if (!state || !PyLong_CheckExact(state.get())) return false;
  return PyLong_AsLong(state.get()) >= parts.plain_value;
}

Ref held_of(const Ref& timeline) {
  const Ref state = parts.timeline_.state.get(timeline);
  if (!state) PyErr_SetString(PyExc_TypeError, "the timeline has no state");
  return state ? attribute(state, names.held) : Ref();
}

PyObject* python(const Native& native, PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                 PyObject* keywords) {
  const Py_ssize_t given = count + (keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords));
  const std::unique_ptr<PyObject*[]> all(new (std::nothrow) PyObject*[given + 1]);
  if (!all) return PyErr_NoMemory();
  all[0] = self;
  std::copy_n(arguments, given, all.get() + 1);
  return PyObject_Vectorcall(native.python, all.get(), count + 1, keywords);
}

Native lease_methods[] = {
    {"Workspace", {"lease", WORKSPACE_FUNCTION(lease), METH_FASTCALL | METH_KEYWORDS, nullptr}, nullptr},
    {"Lease", {"__enter__", enter, METH_NOARGS, nullptr}, nullptr},
    {"Lease", {"__exit__", WORKSPACE_FUNCTION(exit), METH_FASTCALL, nullptr}, nullptr},
    {nullptr, {}, nullptr},
};

}  // namespace workspace

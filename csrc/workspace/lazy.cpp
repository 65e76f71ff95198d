// Leases whose tensors come one by one from the framework's allocator, under `caching` and `upstream`.

#include "methods.h"
#include "order.h"

namespace workspace {

namespace {

enum { ENTER, EXIT, ALLOCATE };

// Whether the C++ knows what a provider does: the strategies themselves, with nothing around them.
bool known(const Ref& provider) {
  return provider && (Py_IS_TYPE(provider.get(), parts.caching) || Py_IS_TYPE(provider.get(), parts.upstream));
}

// Whether an acquire is the steady case; -1 with an exception set.
int may_enter(PyObject* self, const Ref& request, const Ref& workspace, const Ref& timeline) {
  if (!parts.lease_.state.holds(self, parts.idle) || !is_true(parts.request_.direct.get(request)) || !workspace) return 0;
  if (!steady(timeline)) return 0;
  const Ref closed = attribute(workspace, names.closed);
  if (!closed) return -1;
  if (!closed.is(Py_False)) return 0;
  const int outside = outside_the_lock(timeline);
  return outside > 0 ? quiet() : outside;
}

PyObject* enter(PyObject* self, PyObject*) {
  const Native& native = lazy_methods[ENTER];
  const Ref request = parts.lease_.request.get(self), workspace = parts.lease_.workspace.get(self);
  const Ref timeline = parts.request_.timeline.get(request), extents = parts.request_.extents.get(request);
  const int may = timeline && parts.inlined.intact() ? may_enter(self, request, workspace, timeline) : 0;
  if (may < 0) return nullptr;
  Ref provider = may ? attribute(workspace, names.provider) : Ref();
  if (may && !provider) return nullptr;
  if (!known(provider) || !extents || !PyTuple_Check(extents.get())) return python(native, self, nullptr, 0);
  Ref held = held_of(timeline), homes(PyDict_New()), tensors(PyList_New(0));
  if (!held || !homes || !tensors) return nullptr;
  for (Py_ssize_t left = PyTuple_GET_SIZE(extents.get()); left > 0; --left) {
    if (PyList_Append(tensors.get(), Py_None)) return nullptr;
  }
  Ref stream = Order(timeline).current();
  if (PyErr_Occurred()) return nullptr;
  // A strategy that is known places nothing, so that no lock is needed: no Python runs from here on. A stream that was
  // never seen, and a capture that began meanwhile, are not the steady case.
  if (!stream || !steady(timeline)) return python(native, self, nullptr, 0);
  parts.holding_.stream.set(self, std::move(stream));
  parts.lease_.provider.set(self, std::move(provider));
  parts.lease_.block.set(self, Ref::of(Py_None));
  parts.lazy_.homes.set(self, std::move(homes));
  parts.lazy_.made.set(self, Ref::of(Py_None));
  parts.lease_.tensors.set(self, std::move(tensors));
  parts.lease_.state.set(self, Ref::of(parts.plain));
  parts.holding_.held.set(self, Ref::of(held.get()));
  if (PyDict_SetItem(held.get(), self, Py_None)) return nullptr;
  return Py_NewRef(self);
}

// Adds to a number that is an attribute.
bool add(const Ref& to, PyObject* name, long long more) {
  if (more == 0) return true;
  const Ref before = attribute(to, name);
  const Ref added(before ? PyLong_FromLongLong(more) : nullptr);
  const Ref sum(added ? PyNumber_Add(before.get(), added.get()) : nullptr);
  return sum && PyObject_SetAttr(to.get(), name, sum.get()) == 0;
}

bool count_bytes(const Ref& provider, long long more) {
  const Ref counted = attribute(provider, names._counted);
  return counted && add(counted, names.allocated, more);
}

// Bytes of a position; -1 with an exception set.
long long bytes_of(const Ref& extents, PyObject* position) {
  const Py_ssize_t at = PyNumber_AsSsize_t(position, PyExc_IndexError);
  if (at == -1 && PyErr_Occurred()) return -1;
  const Ref extent(PySequence_GetItem(extents.get(), at));
  const Ref nbytes = parts.extent_.nbytes.get(extent);
  if (!nbytes) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "an extent of the layout is none");
    return -1;
  }
  return PyLong_AsLongLong(nbytes.get());
}

// Tells the allocator of a use that does not precede the next work of the tensor's home; counts what it need not hear.
bool tell(Order& order, const Ref& entry, const Ref& used, const Ref& epoch, long long counts[2]) {
  PyObject *tensor, *home;
  if (!PyArg_ParseTuple(entry.get(), "OO", &tensor, &home)) return false;
  const Ref key = parts.stream_.key.get(used);
  if (!Py_IS_TYPE(home, parts.stream) || !key) {
    PyErr_SetString(PyExc_TypeError, "a stream of the lease is none");
    return false;
  }
  const Clock* const by = order.clock(used);
  if (home == used.get() || by == nullptr) return by != nullptr;
  const long long until = PyLong_AsLongLong(epoch.get());
  const Order::View view = order.view(Ref::of(home));
  const int ordered = view.clock != nullptr && !PyErr_Occurred() ? view.ordered(*by, until) : -1;
  if (ordered < 0) return false;
  ++counts[ordered ? 0 : 1];
  return ordered || call_method(names.record_use, order.driver().get(), tensor, key.get()) || order.failed();
}

// `Caching.returned` and `Upstream.returned` for a lease whose only use is on its own stream.
bool returned(Order& order, const Ref& provider, const Ref& extents, const Ref& homes, const Ref& used,
              const Ref& epoch) {
  const bool tells = Py_IS_TYPE(provider.get(), parts.caching);
  long long freed = 0, counts[2] = {0, 0};
  bool fine = true;
  // The dict is this function's alone by now: nobody changes it during the calls.
  PyObject *position, *entry;
  for (Py_ssize_t at = 0; fine && PyDict_Next(homes.get(), &at, &position, &entry);) {
    const long long nbytes = bytes_of(extents, position);
    freed += nbytes;
    fine = nbytes >= 0 && (!tells || tell(order, Ref::of(entry), used, epoch, counts));
  }
  Ref error = fine ? Ref() : taken_error();
  if (!add(provider, names.elided, counts[0]) || !add(provider, names.recorded, counts[1])) return false;
  if (!error) return fine && count_bytes(provider, -freed);
  if (!call_method(names.keep, provider.get(), homes.get())) return false;
  raise(std::move(error));
  return false;
}

PyObject* exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Native& native = lazy_methods[EXIT];
  const Ref request = parts.lease_.request.get(self), provider = parts.lease_.provider.get(self);
  const Ref timeline = parts.request_.timeline.get(request), extents = parts.request_.extents.get(request);
  if (!parts.lease_.state.holds(self, parts.plain) || count != 3 || !known(provider) || !timeline || !extents ||
      !Py_IS_TYPE(timeline.get(), parts.timeline) || !parts.inlined.intact()) {
    return python(native, self, arguments, count);
  }
  const int outside = outside_the_lock(timeline);
  if (outside < 0) return nullptr;
  if (!outside) return python(native, self, arguments, count);
  const Ref held = parts.holding_.held.get(self), stream = parts.holding_.stream.get(self);
  Ref none_yet(PyDict_New());
  Order order(timeline);
  if (!none_yet) return nullptr;
  if (!order) return python(native, self, arguments, count);
  Locked locked(timeline);
  if (!locked) return nullptr;
  if (!parts.lease_.state.holds(self, parts.plain) || !held || !PyDict_Check(held.get())) {
    // Forked or released meanwhile, by another thread.
    return locked.unlock() ? python(native, self, arguments, count) : nullptr;
  }
  const Ref epoch = order.epoch(stream);
  if (!epoch) return nullptr;
  parts.lease_.state.set(self, Ref::of(parts.idle));
  const Ref tensors = parts.lease_.tensors.exchange(self, Ref::of(Py_None));
  if (PyDict_DelItem(held.get(), self)) return nullptr;
  const Ref homes = parts.lazy_.homes.exchange(self, std::move(none_yet));
  if (homes && PyDict_CheckExact(homes.get()) && !returned(order, provider, extents, homes, stream, epoch)) return nullptr;
  if (!locked.unlock()) return nullptr;
  Py_RETURN_NONE;
}

// What one `allocate` works on.
struct Making {
  PyObject* self;
  Ref request, provider, extents, tensors, homes, stream;
};

// `LazyLease._note`, where `may_make`. False with an exception set.
bool note(Order& order, const Making& on, PyObject* position) {
  if (parts.lease_.state.holds(on.self, parts.plain)) return true;
  Ref made = parts.lazy_.made.get(on.self);
  if (!made || made.is(Py_None)) {
    made = Ref(PyDict_New());
    if (!made) return false;
    parts.lazy_.made.set(on.self, Ref::of(made.get()));
  }
  const Ref epoch = order.epoch(on.stream);
  const Ref where(epoch ? PyTuple_Pack(3, on.stream.get(), epoch.get(), Py_None) : nullptr);
  return where && PyDict_SetItem(made.get(), position, where.get()) == 0;
}

// Whether all of the positions that were allocated were so on the current stream, or nobody else uses them: otherwise it
// may have to wait. -1 with an exception set.
int all_here(const Making& on, const Ref& positions) {
  const Ref made = parts.lazy_.made.get(on.self);
  if (!made || made.is(Py_None) || parts.lease_.state.holds(on.self, parts.plain)) return 1;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(positions.get()); ++index) {
    const Ref where = item(made, Ref::of(PyTuple_GET_ITEM(positions.get(), index)));
    if (!where && PyErr_Occurred()) return -1;
    if (where && (!PyTuple_CheckExact(where.get()) || PyTuple_GET_ITEM(where.get(), 0) != on.stream.get())) return 0;
  }
  return 1;
}

// One tensor from the framework's allocator, noted as `LazyLease._keep` does; its bytes, -1 with an exception set.
long long make(Order& order, const Making& on, PyObject* empty, PyObject* position, Py_ssize_t at) {
  const Ref extent(PySequence_GetItem(on.extents.get(), at)), key = parts.stream_.key.get(on.stream);
  const Ref shape = parts.extent_.shape.get(extent), dtype = parts.extent_.dtype.get(extent);
  if (!shape || !dtype || !key) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "an extent of the layout is none");
    return -1;
  }
  const Ref tensor = call(empty, shape.get(), dtype.get(), key.get());
  if (!tensor) return order.failed(), -1;
  if (!parts.lease_.tensors.holds(on.self, on.tensors.get()) || !parts.lazy_.homes.holds(on.self, on.homes.get())) {
    // Released during the allocation: the Python method says what that means.
    const Ref kept = call_method(names._keep, on.self, position, tensor.get(), on.stream.get());
    return kept ? bytes_of(on.extents, position) : -1;
  }
  if (!note(order, on, position) || PyList_SetItem(on.tensors.get(), at, Py_NewRef(tensor.get()))) return -1;
  const Ref home(PyTuple_Pack(2, tensor.get(), on.stream.get()));
  if (!home || PyDict_SetItem(on.homes.get(), position, home.get())) return -1;
  return bytes_of(on.extents, position);
}

// Makes what is missing of the positions. False with an exception set; what was made is counted all the same.
bool make_missing(Order& order, const Making& on, const Ref& positions) {
  const Ref empty = attribute(order.driver(), names.empty);
  if (!empty) return false;
  long long made = 0;
  bool fine = true;
  for (Py_ssize_t index = 0; fine && index < PyTuple_GET_SIZE(positions.get()); ++index) {
    PyObject* const position = PyTuple_GET_ITEM(positions.get(), index);
    const Py_ssize_t at = PyNumber_AsSsize_t(position, PyExc_IndexError);
    const Ref present(at < 0 ? nullptr : PySequence_GetItem(on.tensors.get(), at));
    fine = static_cast<bool>(present);
    if (!present.is(Py_None)) continue;
    const long long nbytes = make(order, on, empty.get(), position, at);
    fine = nbytes >= 0;
    made += fine ? nbytes : 0;
  }
  Ref error = taken_error();
  const bool counted = count_bytes(on.provider, made);
  if (error && counted) raise(std::move(error));
  return fine && counted;
}

// The tensors at some positions; a slot in its place gives its own.
PyObject* found(const Ref& tensors, const Ref& positions) {
  Ref all(PyList_New(0));
  for (Py_ssize_t index = 0; all && index < PyTuple_GET_SIZE(positions.get()); ++index) {
    const Py_ssize_t at = PyNumber_AsSsize_t(PyTuple_GET_ITEM(positions.get(), index), PyExc_IndexError);
    Ref tensor(PySequence_GetItem(tensors.get(), at));
    if (tensor && Py_IS_TYPE(tensor.get(), parts.slot)) tensor = call_method(names.tensor, tensor.get());
    if (!tensor || PyList_Append(all.get(), tensor.get())) return nullptr;
  }
  return all.release();
}

// Whether a tensor may be made on the current stream: on the acquirer's own as long as nobody else uses them, else on one
// whose events may be recorded late.
bool may_make(const Making& on) {
  if (parts.lease_.state.holds(on.self, parts.plain)) return parts.holding_.stream.holds(on.self, on.stream.get());
  return parts.stream_.exact.get(on.stream).is(Py_False);
}

PyObject* allocate(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Native& native = lazy_methods[ALLOCATE];
  Making on{self, parts.lease_.request.get(self), parts.lease_.provider.get(self), Ref(), Ref(), Ref(), Ref()};
  const Ref timeline = parts.request_.timeline.get(on.request);
  if (!is_held(self) || !timeline || !known(on.provider) || !parts.request_.zero.get(on.request).is(Py_False) ||
      !parts.inlined.intact()) {
    return python(native, self, arguments, count);
  }
  const Ref names_given(PyTuple_New(count));
  if (!names_given) return nullptr;
  for (Py_ssize_t index = 0; index < count; ++index) PyTuple_SET_ITEM(names_given.get(), index, Py_NewRef(arguments[index]));
  const Ref positions = item(parts.request_.positions.get(on.request), names_given);
  if (!positions && PyErr_Occurred()) return nullptr;
  Order order(timeline);
  Locked locked(timeline);
  if (!locked) return nullptr;
  if (order && positions && PyTuple_Check(positions.get()) && steady(timeline)) on.stream = order.current();
  on.extents = parts.request_.extents.get(on.request);
  on.tensors = parts.lease_.tensors.get(self);
  on.homes = parts.lazy_.homes.get(self);
  if (PyErr_Occurred()) return nullptr;
  if (!on.stream || !on.extents || !on.tensors || !PyList_Check(on.tensors.get()) || !on.homes ||
      !PyDict_Check(on.homes.get()) || !parts.stream_.capture.get(on.stream).is(Py_None) || !may_make(on)) {
    return locked.unlock() ? python(native, self, arguments, count) : nullptr;
  }
  const int here = all_here(on, positions);
  if (here < 0) return nullptr;
  if (!here) return locked.unlock() ? python(native, self, arguments, count) : nullptr;
  if (!make_missing(order, on, positions) || !locked.unlock()) return nullptr;
  return found(on.tensors, positions);
}

}  // namespace

Native lazy_methods[] = {
    {"LazyLease", {"__enter__", enter, METH_NOARGS, nullptr}, nullptr},
    {"LazyLease", {"__exit__", WORKSPACE_FUNCTION(exit), METH_FASTCALL, nullptr}, nullptr},
    {"LazyLease", {"allocate", WORKSPACE_FUNCTION(allocate), METH_FASTCALL, nullptr}, nullptr},
    {nullptr, {}, nullptr},
};

}  // namespace workspace

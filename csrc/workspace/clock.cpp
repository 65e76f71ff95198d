#include "clock.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace workspace {

namespace {

PyTypeObject seen_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject clock_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Seen::Entry* place(const Seen& in, long long stream) {
  return std::lower_bound(in.entries, in.entries + in.size, stream,
                          [](const Seen::Entry& one, long long id) { return one.stream < id; });
}

bool is_there(const Seen& in, const Seen::Entry* at, long long stream) {
  return at != in.entries + in.size && at->stream == stream;
}

// Room for so many. False with an exception set.
bool reserve(Seen* of, Py_ssize_t count) {
  if (count <= of->room) return true;
  const Py_ssize_t room = std::max(count, 2 * of->room);
  auto* const entries = static_cast<Seen::Entry*>(PyMem_Malloc(room * sizeof(Seen::Entry)));
  if (entries == nullptr) return PyErr_NoMemory() != nullptr;
  std::copy_n(of->entries, of->size, entries);
  if (of->entries != of->few) PyMem_Free(of->entries);
  of->entries = entries;
  of->room = room;
  return true;
}

// -- the face of a dict ------------------------------------------------------------------------------------------
// A stream's id or an epoch. False with an exception set.
bool number(PyObject* given, long long* value) {
  *value = PyLong_AsLongLong(given);
  return *value != -1 || !PyErr_Occurred();
}

Py_ssize_t length(PyObject* self) { return Seen::of(self)->size; }

// What there is of a stream; null without an exception where there is nothing.
const Seen::Entry* found(PyObject* self, PyObject* key) {
  long long stream;
  if (!number(key, &stream)) return nullptr;
  const Seen::Entry* const at = place(*Seen::of(self), stream);
  return is_there(*Seen::of(self), at, stream) ? at : nullptr;
}

PyObject* subscript(PyObject* self, PyObject* key) {
  const Seen::Entry* const at = found(self, key);
  if (at != nullptr) return PyLong_FromLongLong(at->epoch);
  if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
  return nullptr;
}

int assign(PyObject* self, PyObject* key, PyObject* value) {
  long long stream, epoch;
  if (value == nullptr) {
    PyErr_SetString(PyExc_TypeError, "what is seen is not forgotten one by one");
    return -1;
  }
  return number(key, &stream) && number(value, &epoch) && Seen::of(self)->set(stream, epoch) ? 0 : -1;
}

PyObject* get(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 1 || count > 2) {
    PyErr_Format(PyExc_TypeError, "get takes a stream and what to return for one not seen, not %zd arguments", count);
    return nullptr;
  }
  const Seen::Entry* const at = found(self, arguments[0]);
  if (at != nullptr) return PyLong_FromLongLong(at->epoch);
  return PyErr_Occurred() ? nullptr : Py_NewRef(count == 2 ? arguments[1] : Py_None);
}

Ref as_dict(PyObject* self) {
  Ref dict(PyDict_New());
  for (Py_ssize_t at = 0; dict && at < Seen::of(self)->size; ++at) {
    const Seen::Entry& one = Seen::of(self)->entries[at];
    const Ref stream(PyLong_FromLongLong(one.stream)), epoch(PyLong_FromLongLong(one.epoch));
    if (!stream || !epoch || PyDict_SetItem(dict.get(), stream.get(), epoch.get())) return Ref();
  }
  return dict;
}

PyObject* keys(PyObject* self, PyObject*) {
  const Ref dict = as_dict(self);
  return dict ? PyDict_Keys(dict.get()) : nullptr;
}

PyObject* items(PyObject* self, PyObject*) {
  const Ref dict = as_dict(self);
  return dict ? PyDict_Items(dict.get()) : nullptr;
}

PyObject* iterate(PyObject* self) {
  const Ref all(keys(self, nullptr));
  return all ? PyObject_GetIter(all.get()) : nullptr;
}

PyObject* copy(PyObject* self, PyObject*) { return Seen::of(self)->copy().release(); }

PyObject* compare(PyObject* self, PyObject* other, int how) {
  if (how != Py_EQ && how != Py_NE) Py_RETURN_NOTIMPLEMENTED;
  const Ref one = as_dict(self), another = Seen::is_one(other) ? as_dict(other) : Ref::of(other);
  return one && another ? PyObject_RichCompare(one.get(), another.get(), how) : nullptr;
}

PyObject* represent(PyObject* self) {
  const Ref dict = as_dict(self);
  return dict ? PyObject_Repr(dict.get()) : nullptr;
}

PyObject* new_seen(PyTypeObject*, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != 0 || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0)) {
    PyErr_SetString(PyExc_TypeError, "Seen takes no arguments");
    return nullptr;
  }
  return Seen::make().release();
}

void destroy_seen(PyObject* self) {
  if (Seen::of(self)->entries != Seen::of(self)->few) PyMem_Free(Seen::of(self)->entries);
  Py_TYPE(self)->tp_free(self);
}

PyMethodDef seen_methods[] = {
    {"get", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(get)), METH_FASTCALL, "As of a dict."},
    {"keys", keys, METH_NOARGS, "A list of the streams, in order."},
    {"items", items, METH_NOARGS, "A list of (stream, epoch), in the streams' order."},
    {"copy", copy, METH_NOARGS, "Another of the same."},
    {nullptr, nullptr, 0, nullptr},
};

PyMappingMethods seen_mapping = {length, subscript, assign};

bool add_seen(PyObject* module) {
  seen_type.tp_name = "workspace._native.Seen";
  seen_type.tp_doc = "Stream id -> largest epoch ordered before.";
  seen_type.tp_basicsize = sizeof(Seen);
  seen_type.tp_flags = Py_TPFLAGS_DEFAULT;
  seen_type.tp_methods = seen_methods;
  seen_type.tp_as_mapping = &seen_mapping;
  seen_type.tp_iter = iterate;
  seen_type.tp_richcompare = compare;
  seen_type.tp_hash = PyObject_HashNotImplemented;
  seen_type.tp_repr = represent;
  seen_type.tp_new = new_seen;
  seen_type.tp_dealloc = destroy_seen;
  return PyModule_AddType(module, &seen_type) == 0;
}

// -- a stream's clock --------------------------------------------------------------------------------------------
PyObject* new_clock(PyTypeObject* made, PyObject* arguments, PyObject*) {
  long long id;
  PyObject* seen;
  if (!PyArg_ParseTuple(arguments, "LO:Clock", &id, &seen)) return nullptr;
  PyObject* const clock = made->tp_alloc(made, 0);
  if (clock == nullptr) return nullptr;
  Clock::of(clock)->id = id;
  Clock::of(clock)->epoch = 1;
  Clock::of(clock)->seen = Py_NewRef(seen);
  return clock;
}

void destroy_clock(PyObject* self) {
  Py_XDECREF(Clock::of(self)->seen);
  Py_XDECREF(Clock::of(self)->kept);
  Py_TYPE(self)->tp_free(self);
}

PyMemberDef clock_members[] = {
    {"id", T_LONGLONG, offsetof(Clock, id), READONLY, nullptr},
    {"epoch", T_LONGLONG, offsetof(Clock, epoch), 0, nullptr},
    {"waited", T_LONGLONG, offsetof(Clock, waited), 0, nullptr},
    {"seen", T_OBJECT_EX, offsetof(Clock, seen), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

bool add_clock(PyObject* module) {
  clock_type.tp_name = "workspace._native.Clock";
  clock_type.tp_doc = "What the clocks know of one stream: `workspace.clocks.Clock`.";
  clock_type.tp_basicsize = sizeof(Clock);
  clock_type.tp_flags = Py_TPFLAGS_DEFAULT;
  clock_type.tp_members = clock_members;
  clock_type.tp_new = new_clock;
  clock_type.tp_dealloc = destroy_clock;
  return PyModule_AddType(module, &clock_type) == 0;
}

}  // namespace

bool Seen::is_one(PyObject* object) { return object != nullptr && Py_IS_TYPE(object, &seen_type); }

Ref Seen::make() {
  Seen* const made = PyObject_New(Seen, &seen_type);
  if (made == nullptr) return Ref();
  made->size = 0;
  made->room = std::size(made->few);
  made->entries = made->few;
  return Ref(reinterpret_cast<PyObject*>(made));
}

Ref Seen::copy() const {
  Ref made = make();
  if (!made || !reserve(of(made), size + 1)) return Ref();
  std::copy_n(entries, size, of(made)->entries);
  of(made)->size = size;
  return made;
}

long long Seen::get(long long stream) const {
  const Entry* const at = place(*this, stream);
  return is_there(*this, at, stream) ? at->epoch : 0;
}

bool Seen::set(long long stream, long long epoch) {
  Entry* at = place(*this, stream);
  if (!is_there(*this, at, stream)) {
    const Py_ssize_t index = at - entries;
    if (!reserve(this, size + 1)) return false;
    at = entries + index;
    std::copy_backward(at, entries + size, entries + size + 1);
    ++size;
    at->stream = stream;
  }
  at->epoch = epoch;
  return true;
}

bool Seen::merge(const Seen& other) {
  for (Py_ssize_t index = 0; index < other.size; ++index) {
    const Entry one = other.entries[index];
    if (get(one.stream) < one.epoch && !set(one.stream, one.epoch)) return false;
  }
  return true;
}

bool Clock::is_one(PyObject* object) { return object != nullptr && Py_IS_TYPE(object, &clock_type); }

Seen* Clock::known() const {
  if (Seen::is_one(seen)) return Seen::of(seen);
  PyErr_SetString(PyExc_TypeError, "what a stream has seen is of another kind");
  return nullptr;
}

bool add_clocks(PyObject* module) { return add_seen(module) && add_clock(module); }

}  // namespace workspace

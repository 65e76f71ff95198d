#include "verbs.h"

#include <cstddef>

namespace workspace {

namespace {

// The driver's functions. Under its later name the last one takes one more, which it leaves alone.
using Record = int (*)(void* event, void* stream);
using Wait = int (*)(void* stream, void* event, unsigned int flags);
using Info = int (*)(void* stream, int* status, unsigned long long* identity, void*, void*, void*, void*);

// A verb that is the driver's own function at an address, or one of torch's. What it does not know how to do, and what
// fails, is left to `otherwise`, which does it the long way and says what is wrong.
struct Verb {
  PyObject_HEAD
  vectorcallfunc called;
  void* address;        // of the driver's function
  PyObject* known;      // dict: stream key -> handle; handle -> key; or key -> arguments
  PyObject* function;   // torch's
  PyObject* argument;   // the device's index
  PyObject* kept;       // dict of the keys whose streams are never destroyed
  PyObject* otherwise;
  bool several;         // devices: the default stream means the current one's
};

Verb* verb(PyObject* self) { return reinterpret_cast<Verb*>(self); }

PyObject* the_long_way(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  return PyObject_Vectorcall(verb(self)->otherwise, arguments, PyVectorcall_NARGS(count), keywords);
}

// Handles of the event and of the stream of a call. False without an exception where the long way is to be taken.
bool handles(const Verb* self, PyObject* const* arguments, size_t count, PyObject* keywords, void* found[2]) {
  if (PyVectorcall_NARGS(count) != 2 || keywords != nullptr || !PyLong_CheckExact(arguments[0])) return false;
  PyObject* const stream = PyDict_GetItemWithError(self->known, arguments[1]);
  if (stream != nullptr) {
    found[0] = PyLong_AsVoidPtr(arguments[0]);
    found[1] = PyLong_AsVoidPtr(stream);
    // Otherwise 0 is the default stream of whatever device is current.
    if (!PyErr_Occurred()) return found[1] != nullptr || !self->several;
  }
  PyErr_Clear();
  return false;
}

PyObject* record(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  void* found[2];
  if (handles(verb(self), arguments, count, keywords, found)) {
    int code;
    Py_BEGIN_ALLOW_THREADS  // it blocks where the device's queue is full
    code = reinterpret_cast<Record>(verb(self)->address)(found[0], found[1]);
    Py_END_ALLOW_THREADS
    if (code == 0) Py_RETURN_NONE;
  }
  return the_long_way(self, arguments, count, keywords);
}

PyObject* wait(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  void* found[2];
  if (handles(verb(self), arguments, count, keywords, found)) {
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = reinterpret_cast<Wait>(verb(self)->address)(found[1], found[0], 0);
    Py_END_ALLOW_THREADS
    if (code == 0) Py_RETURN_NONE;
  }
  return the_long_way(self, arguments, count, keywords);
}

PyObject* current(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  if (PyVectorcall_NARGS(count) == 0 && keywords == nullptr) {
    const Ref handle = call(verb(self)->function, verb(self)->argument);
    if (!handle) return nullptr;
    PyObject* const key = PyDict_GetItemWithError(verb(self)->known, handle.get());
    if (key != nullptr) return Py_NewRef(key);
    PyErr_Clear();
  }
  return the_long_way(self, arguments, count, keywords);
}

PyObject* capture_of(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  PyObject* const handle = PyVectorcall_NARGS(count) == 1 && keywords == nullptr
                               ? PyDict_GetItemWithError(verb(self)->known, arguments[0])
                               : nullptr;
  void* const stream = handle != nullptr ? PyLong_AsVoidPtr(handle) : nullptr;
  PyErr_Clear();
  if (stream != nullptr) {
    int code, status = 0;
    unsigned long long identity = 0;
    Py_BEGIN_ALLOW_THREADS
    code = reinterpret_cast<Info>(verb(self)->address)(stream, &status, &identity, nullptr, nullptr, nullptr, nullptr);
    Py_END_ALLOW_THREADS
    if (code == 0 && status == 0) return PyLong_FromLong(0);
    if (code == 0 && status == 1 && identity != 0) return PyLong_FromUnsignedLongLong(identity);
  }
  return the_long_way(self, arguments, count, keywords);
}

// What torch's function takes for a stream that is never destroyed; empty without an exception for any other.
Ref stream_arguments(const Verb* self, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(self->known, key);
  if (found != nullptr) return Ref::of(found);
  if (PyErr_Occurred() || PyDict_Contains(self->kept, key) != 1) {
    PyErr_Clear();
    return Ref();
  }
  Ref made(Py_BuildValue("(OOi)", key, self->argument, 1));  // 1: c10::DeviceType::CUDA
  if (!made || PyDict_SetItem(self->known, key, made.get())) PyErr_Clear();
  return made;
}

PyObject* set_stream(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  // torch makes the stream's device current too, which is to stay what it was.
  if (PyVectorcall_NARGS(count) == 1 && keywords == nullptr && !verb(self)->several) {
    const Ref given = stream_arguments(verb(self), arguments[0]);
    if (given) return PyObject_Call(verb(self)->function, given.get(), nullptr);
  }
  return the_long_way(self, arguments, count, keywords);
}

// -- the type -----------------------------------------------------------------------------------------------
int traverse(PyObject* self, visitproc visit, void* arg) {
  const Verb* const one = verb(self);
  Py_VISIT(one->known);
  Py_VISIT(one->function);
  Py_VISIT(one->argument);
  Py_VISIT(one->kept);
  Py_VISIT(one->otherwise);
  return 0;
}

int clear(PyObject* self) {
  Verb* const one = verb(self);
  Py_CLEAR(one->known);
  Py_CLEAR(one->function);
  Py_CLEAR(one->argument);
  Py_CLEAR(one->kept);
  Py_CLEAR(one->otherwise);
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyObject_GC_Del(self);
}

PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool make_type() {
  type.tp_name = "workspace._native.Verb";
  type.tp_doc = "A verb of a driver.";
  type.tp_basicsize = sizeof(Verb);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(Verb, called);
  type.tp_call = PyVectorcall_Call;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_dealloc = destroy;
  return PyType_Ready(&type) == 0;
}

Verb* made(vectorcallfunc called, PyObject* otherwise) {
  Verb* const one = PyObject_GC_New(Verb, &type);
  if (one == nullptr) return nullptr;
  one->called = called;
  one->address = nullptr;
  one->known = one->function = one->argument = one->kept = nullptr;
  one->otherwise = Py_NewRef(otherwise);
  one->several = false;
  return one;
}

PyObject* tracked(Verb* one) {
  auto* const object = reinterpret_cast<PyObject*>(one);
  PyObject_GC_Track(object);
  return object;
}

PyObject* enqueue(vectorcallfunc called, PyObject* arguments) {
  PyObject *handles, *otherwise;
  unsigned long long address;
  int several;
  if (!PyArg_ParseTuple(arguments, "KO!pO", &address, &PyDict_Type, &handles, &several, &otherwise)) return nullptr;
  Verb* const one = made(called, otherwise);
  if (one == nullptr) return nullptr;
  one->address = reinterpret_cast<void*>(address);
  one->known = Py_NewRef(handles);
  one->several = several != 0;
  return tracked(one);
}

PyObject* new_record(PyObject*, PyObject* arguments) { return enqueue(record, arguments); }
PyObject* new_wait(PyObject*, PyObject* arguments) { return enqueue(wait, arguments); }
PyObject* new_capture_of(PyObject*, PyObject* arguments) { return enqueue(capture_of, arguments); }

PyObject* new_current(PyObject*, PyObject* arguments) {
  PyObject *function, *index, *keys, *otherwise;
  if (!PyArg_ParseTuple(arguments, "OO!O!O", &function, &PyLong_Type, &index, &PyDict_Type, &keys, &otherwise)) {
    return nullptr;
  }
  Verb* const one = made(current, otherwise);
  if (one == nullptr) return nullptr;
  one->known = Py_NewRef(keys);
  one->function = Py_NewRef(function);
  one->argument = Py_NewRef(index);
  return tracked(one);
}

PyObject* new_set(PyObject*, PyObject* arguments) {
  PyObject *function, *index, *handles, *otherwise;
  int several;
  if (!PyArg_ParseTuple(arguments, "OO!O!pO", &function, &PyLong_Type, &index, &PyDict_Type, &handles, &several,
                        &otherwise)) {
    return nullptr;
  }
  Ref known(PyDict_New());
  Verb* const one = known ? made(set_stream, otherwise) : nullptr;
  if (one == nullptr) return nullptr;
  one->known = known.release();
  one->function = Py_NewRef(function);
  one->argument = Py_NewRef(index);
  one->kept = Py_NewRef(handles);
  one->several = several != 0;
  return tracked(one);
}

PyMethodDef makers[] = {
    {"record", new_record, METH_VARARGS,
     "record(address, handles, several, otherwise): ``cuEventRecord`` at an address, for an event and a stream's key."},
    {"wait", new_wait, METH_VARARGS,
     "wait(address, handles, several, otherwise): ``cuStreamWaitEvent`` at an address, for an event and a stream's key."},
    {"capture_of", new_capture_of, METH_VARARGS,
     "capture_of(address, handles, several, otherwise): ``cuStreamGetCaptureInfo`` at an address, for a stream's key."},
    {"current_stream", new_current, METH_VARARGS,
     "current_stream(function, index, keys, otherwise): the key of the handle that torch's function has for a device."},
    {"set_stream", new_set, METH_VARARGS,
     "set_stream(function, index, handles, several, otherwise): make a stream current through torch's function."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

namespace {

// A stream's handle; null where it may be destroyed, and for the default stream. No exception is set.
void* handle_of(PyObject* by, Together::Of stream) {
  PyObject* const handles = verb(by)->known;
  if (stream.clock->kept == handles) return stream.clock->handle;
  PyObject* const found = PyDict_GetItemWithError(handles, stream.key);
  void* const handle = found != nullptr ? PyLong_AsVoidPtr(found) : nullptr;
  PyErr_Clear();
  if (handle == nullptr) return nullptr;
  // A stream that is never destroyed keeps its handle.
  const Ref before(std::exchange(stream.clock->kept, Py_NewRef(handles)));
  return stream.clock->handle = handle;
}

}  // namespace

Together::Together(PyObject* capture_of, PyObject* record, PyObject* wait, Of from, Of to) {
  const auto address = [](PyObject* of, vectorcallfunc called) {
    return Py_IS_TYPE(of, &type) && verb(of)->called == called ? verb(of)->address : nullptr;
  };
  capture_of_ = address(capture_of, workspace::capture_of);
  record_ = address(record, workspace::record);
  wait_ = address(wait, workspace::wait);
  if (capture_of_ == nullptr || record_ == nullptr || wait_ == nullptr) return;
  from_ = handle_of(record, from);
  to_ = handle_of(wait, to);
  // The default stream is left to the verbs: it never captures, and of several devices it is the current one's.
  known_ = from_ != nullptr && to_ != nullptr;
}

Together::Done Together::run(PyObject* event) const {
  void* const handle = PyLong_AsVoidPtr(event);
  if (handle == nullptr) {
    PyErr_Clear();
    return NOTHING;
  }
  Done done = NOTHING;
  Py_BEGIN_ALLOW_THREADS
  int status = 0;
  unsigned long long identity = 0;
  const auto info = reinterpret_cast<Info>(capture_of_);
  if (info(from_, &status, &identity, nullptr, nullptr, nullptr, nullptr) != 0 || status != 0) {
    done = CAPTURES;
  } else if (reinterpret_cast<Record>(record_)(handle, from_) == 0) {
    done = reinterpret_cast<Wait>(wait_)(to_, handle, 0) == 0 ? ALL : RECORDED;
  }
  Py_END_ALLOW_THREADS
  return done;
}

bool add_verbs(PyObject* module) { return make_type() && PyModule_AddFunctions(module, makers) == 0; }

}  // namespace workspace

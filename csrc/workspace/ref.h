// Owned references, and the few calls on them that the steady path makes. An empty Ref that a call returns means that
// an exception is set; one that a field returns means that the field is not set.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace workspace {

class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref of(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    Ref old(std::exchange(object_, other.release()));
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }
  bool is(PyObject* other) const { return object_ == other; }

 private:
  PyObject* object_ = nullptr;
};

inline Ref attribute(const Ref& of, PyObject* name) { return Ref(PyObject_GetAttr(of.get(), name)); }

inline Ref call(const Ref& callable) { return Ref(PyObject_CallNoArgs(callable.get())); }

template <typename... Given>
Ref call(PyObject* callable, Given... given) {
  PyObject* const arguments[] = {nullptr, given...};
  return Ref(PyObject_Vectorcall(callable, arguments + 1, sizeof...(given) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

template <typename... Given>
Ref call_method(PyObject* name, PyObject* self, Given... given) {
  PyObject* const arguments[] = {nullptr, self, given...};
  const size_t count = sizeof...(given) + 1;
  return Ref(PyObject_VectorcallMethod(name, arguments + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// A dict's value; empty without an exception where there is none, or no dict.
inline Ref item(const Ref& dict, const Ref& key) {
  if (!dict || !key || !PyDict_Check(dict.get())) return Ref();
  return Ref::of(PyDict_GetItemWithError(dict.get(), key.get()));
}

// Whether a < b, as for epochs, which are ints; -1 with an exception set.
inline int less(PyObject* a, PyObject* b) {
  if (PyLong_CheckExact(a) && PyLong_CheckExact(b)) {
    int far_a = 0, far_b = 0;
    const long long one = PyLong_AsLongLongAndOverflow(a, &far_a);
    const long long other = PyLong_AsLongLongAndOverflow(b, &far_b);
    if (far_a == 0 && far_b == 0) return one < other;
  }
  return PyObject_RichCompareBool(a, b, Py_LT);
}
inline int less(const Ref& a, const Ref& b) { return less(a.get(), b.get()); }

// Whether two are the same number; -1 with an exception set.
inline int same(PyObject* a, PyObject* b) { return a == b ? 1 : PyObject_RichCompareBool(a, b, Py_EQ); }

inline bool is_true(const Ref& value) { return value.is(Py_True); }

// The exception that is set, taken away; `raise` sets it again.
inline Ref taken_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return Ref(PyErr_GetRaisedException());
#else
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (type == nullptr) return Ref();
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return Ref(value);
#endif
}

inline void raise(Ref error) {
#if PY_VERSION_HEX >= 0x030C0000
  PyErr_SetRaisedException(error.release());
#else
  PyObject* value = error.release();
  PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(value))), value, PyException_GetTraceback(value));
#endif
}

}  // namespace workspace

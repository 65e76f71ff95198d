// The slots of the Python classes, read where they lie: both forms keep their state there.
#pragma once

#include "ref.h"

namespace workspace {

class Field {
 public:
  // Finds `name` among the ``__slots__`` of a class. False with an exception set.
  bool find(PyObject* type, const char* name);

  // The value; empty, without an exception, where it is not set or the object is none of the class.
  Ref get(const Ref& self) const {
    return self && PyObject_TypeCheck(self.get(), type_) ? Ref::of(at(self.get())) : Ref();
  }

  // The rest is for a method's self, and for objects that a `get` has shown to be of the class.
  Ref get(PyObject* self) const { return Ref::of(at(self)); }
  // Borrowed, or null: for a look while no Python runs.
  PyObject* peek(PyObject* self) const { return at(self); }
  bool holds(PyObject* self, PyObject* value) const { return at(self) == value; }
  // Returns the old value, which may run a finaliser when it goes.
  Ref exchange(PyObject* self, Ref value) const { return Ref(std::exchange(at(self), value.release())); }
  void set(PyObject* self, Ref value) const { const Ref old = exchange(self, std::move(value)); }

 private:
  PyObject*& at(PyObject* self) const { return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(self) + offset_); }

  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = 0;
};

}  // namespace workspace

#include "field.h"

#include <structmember.h>

namespace workspace {

bool Field::find(PyObject* type, const char* name) {
  if (!PyType_Check(type)) {
    PyErr_Format(PyExc_TypeError, "%R is no class", type);
    return false;
  }
  const Ref found(PyObject_GetAttrString(type, name));
  if (!found) return false;
  if (!Py_IS_TYPE(found.get(), &PyMemberDescr_Type)) {
    PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
    return false;
  }
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member;
  if (member->type != T_OBJECT_EX) {
    PyErr_Format(PyExc_TypeError, "slot %s of %R holds no object", name, type);
    return false;
  }
  type_ = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));  // kept for the life of the process
  offset_ = member->offset;
  return true;
}

}  // namespace workspace

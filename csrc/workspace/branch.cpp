#include "branch.h"

#include "methods.h"

namespace workspace {

int known(const Ref& by_id, PyObject* stream) {
  if (!Py_IS_TYPE(stream, parts.stream)) return 0;
  const Ref found = item(by_id, parts.stream_.id.get(stream));
  return PyErr_Occurred() ? -1 : found.is(stream);
}

Ref new_branch(const Ref& driver, Ref key) {
  Ref branch(parts.branch->tp_alloc(parts.branch, 0));
  if (!branch) return Ref();
  parts.branch_.driver.set(branch.get(), Ref::of(driver.get()));
  parts.branch_.key.set(branch.get(), std::move(key));
  parts.branch_.before.set(branch.get(), Ref::of(Py_None));
  return branch;
}

namespace {

enum { ON, ENTER, EXIT };

PyObject* on(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  const Native& native = branch_methods[ON];
  if (count != 1 || keywords != nullptr) return python(native, self, arguments, count, keywords);
  const Ref timeline(PyObject_GetAttr(self, names.timeline));
  if (!timeline) return nullptr;
  if (!Py_IS_TYPE(timeline.get(), parts.timeline) || !parts.inlined.intact()) return python(native, self, arguments, 1);
  const int is_known = known(parts.timeline_.by_id.get(timeline), arguments[0]);
  if (is_known < 0) return nullptr;
  const Ref driver = parts.timeline_.driver.get(timeline);
  if (!is_known || !driver) return python(native, self, arguments, 1);
  return new_branch(driver, parts.stream_.key.get(Ref::of(arguments[0]))).release();
}

PyObject* enter(PyObject* self, PyObject*) {
  const Ref driver = parts.branch_.driver.get(self), key = parts.branch_.key.get(self);
  Ref before = parts.branch_.before.get(self);
  if (!driver || !key || !before) {
    return python(branch_methods[ENTER], self, nullptr, 0);
  }
  const Ref current = call_method(names.current_stream, driver.get());
  Ref pair(current ? PyTuple_Pack(2, current.get(), before.get()) : nullptr);
  if (!pair) return nullptr;
  parts.branch_.before.set(self, std::move(pair));
  if (!call_method(names.set_stream, driver.get(), key.get())) return nullptr;
  Py_RETURN_NONE;
}

PyObject* exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Ref driver = parts.branch_.driver.get(self), before = parts.branch_.before.get(self);
  if (count != 3 || !driver || !before || !PyTuple_CheckExact(before.get()) || PyTuple_GET_SIZE(before.get()) != 2) {
    return python(branch_methods[EXIT], self, arguments, count);
  }
  parts.branch_.before.set(self, Ref::of(PyTuple_GET_ITEM(before.get(), 1)));
  if (!call_method(names.set_stream, driver.get(), PyTuple_GET_ITEM(before.get(), 0))) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace

Native branch_methods[] = {
    {"Workspace", {"on", WORKSPACE_FUNCTION(on), METH_FASTCALL | METH_KEYWORDS, nullptr}, nullptr},
    {"Branch", {"__enter__", enter, METH_NOARGS, nullptr}, nullptr},
    {"Branch", {"__exit__", WORKSPACE_FUNCTION(exit), METH_FASTCALL, nullptr}, nullptr},
    {nullptr, {}, nullptr},
};

}  // namespace workspace

#include "lock.h"

#include "parts.h"

namespace workspace {

namespace {

PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* create(PyTypeObject* made, PyObject*, PyObject*) {
  Ref lock(made->tp_alloc(made, 0));
  if (!lock) return nullptr;
  PyThread_type_lock const gate = PyThread_allocate_lock();
  if (gate == nullptr) return PyErr_NoMemory();
  PyThread_acquire_lock(gate, NOWAIT_LOCK);
  Lock::of(lock.get())->gate = gate;
  return lock.release();
}

void destroy(PyObject* self) {
  PyThread_type_lock const gate = Lock::of(self)->gate;
  if (gate != nullptr) {
    if (!Lock::of(self)->open) PyThread_release_lock(gate);
    PyThread_free_lock(gate);
  }
  Py_TYPE(self)->tp_free(self);
}

PyObject* acquire(PyObject* self, PyObject*) {
  if (!Lock::of(self)->acquire()) return nullptr;
  Py_RETURN_TRUE;
}

PyObject* release(PyObject* self, PyObject*) {
  if (!Lock::of(self)->release()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* leave(PyObject* self, PyObject* const*, Py_ssize_t) { return release(self, nullptr); }

PyObject* is_owned(PyObject* self, PyObject*) { return PyBool_FromLong(Lock::of(self)->owned()); }

PyMethodDef methods[] = {
    {"acquire", acquire, METH_NOARGS, "Take it, once more where this thread has it; wait for another thread."},
    {"release", release, METH_NOARGS, "Undo one acquire of this thread. Raises RuntimeError when there is none."},
    {"__enter__", acquire, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leave)), METH_FASTCALL, nullptr},
    {"_is_owned", is_owned, METH_NOARGS, "Whether this thread has it."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool Lock::is_one(PyObject* object) { return Py_IS_TYPE(object, &type); }

bool Lock::owned() const { return depth != 0 && owner == PyThread_get_thread_ident(); }

bool Lock::acquire() {
  const unsigned long self = PyThread_get_thread_ident();
  while (depth != 0 && owner != self) {
    // Counted before the interpreter's lock goes, so that the owner's release opens the gate. Who passes it takes the
    // lock if it is still free, and waits for the next release if it is not.
    ++waiting;
    PyLockStatus status;
    Py_BEGIN_ALLOW_THREADS
    status = PyThread_acquire_lock_timed(gate, -1, 1);
    Py_END_ALLOW_THREADS
    --waiting;
    if (status == PY_LOCK_ACQUIRED) open = false;  // passed and shut; a release opens it anew
    if (status == PY_LOCK_INTR && PyErr_CheckSignals() != 0) return false;
  }
  owner = self;
  ++depth;
  return true;
}

bool Lock::release() {
  if (!owned()) {
    PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
    return false;
  }
  if (--depth == 0 && waiting != 0 && !open) {
    open = true;
    PyThread_release_lock(gate);
  }
  return true;
}

Locked::Locked(const Ref& timeline) {
  Ref lock = parts.timeline_.lock.get(timeline);
  if (!lock) {
    PyErr_SetString(PyExc_TypeError, "the timeline has no lock");
    return;
  }
  held_ = Lock::is_one(lock.get()) ? Lock::of(lock.get())->acquire()
                                   : static_cast<bool>(call_method(names.acquire, lock.get()));
  if (held_) lock_ = std::move(lock);
}

bool Locked::unlock() {
  held_ = false;
  if (Lock::is_one(lock_.get())) return Lock::of(lock_.get())->release();
  return static_cast<bool>(call_method(names.release, lock_.get()));
}

Locked::~Locked() {
  if (!held_) return;
  Ref error = taken_error();
  if (!unlock()) PyErr_WriteUnraisable(lock_.get());
  if (error) raise(std::move(error));
}

int outside_the_lock(const Ref& timeline) {
  const Ref lock = parts.timeline_.lock.get(timeline);
  if (!lock) return 0;
  if (Lock::is_one(lock.get())) return !Lock::of(lock.get())->owned();
  const Ref owned = call_method(names._is_owned, lock.get());
  return owned ? owned.is(Py_False) : -1;
}

bool add_lock(PyObject* module) {
  type.tp_name = "workspace._native.Lock";
  type.tp_doc = "A recursive lock, as threading.RLock.";
  type.tp_basicsize = sizeof(Lock);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_methods = methods;
  type.tp_new = create;
  type.tp_dealloc = destroy;
  return PyModule_AddType(module, &type) == 0;
}

}  // namespace workspace

#include "parts.h"

#include <algorithm>
#include <new>

namespace workspace {

Parts parts;
Names names;

bool Names::make() {
#define WORKSPACE_MAKE(name)                   \
  this->name = PyUnicode_InternFromString(#name); \
  if (this->name == nullptr) return false;
  WORKSPACE_NAMES(WORKSPACE_MAKE)
#undef WORKSPACE_MAKE
  return true;
}

bool Inlined::add(PyObject* type, PyObject* name) {
  if (!PyType_Check(type)) {
    PyErr_Format(PyExc_TypeError, "%R is no class", type);
    return false;
  }
  Ref value(PyObject_GetAttr(type, name));
  if (!value) return false;
  auto* const owner = reinterpret_cast<PyTypeObject*>(type);
  const bool known = std::any_of(types_.begin(), types_.end(), [&](const Watched& one) { return one.type == owner; });
  try {
    if (!known) types_.push_back({owner, 0});
    originals_.push_back({type, name, value.get(), nullptr});
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
  // All of it lives as long as the process: a later patch must not free what is compared with.
  Py_INCREF(type);
  Py_INCREF(name);
  value.release();
  return true;
}

void Inlined::allow(PyObject* type, const char* name, PyObject* native) {
  for (Original& one : originals_) {
    if (one.type == type && PyUnicode_CompareWithASCIIString(one.name, name) == 0) one.native = Py_NewRef(native);
  }
}

bool Inlined::compare() {
  for (const Original& one : originals_) {
    const Ref now(PyObject_GetAttr(one.type, one.name));
    if (!now) PyErr_Clear();
    if (!now || (!now.is(one.value) && !now.is(one.native))) return false;
  }
  for (Watched& one : types_) one.tag = one.type->tp_version_tag;
  return true;
}

bool steady(const Ref& timeline) {
  return Py_IS_TYPE(timeline.get(), parts.timeline) && parts.timeline_.busy.get(timeline).is(Py_False);
}

namespace {

// Looks up what `bind` was given; remembers the first failure.
class Given {
 public:
  explicit Given(PyObject* dict) : dict_(dict) {}
  PyObject* object(const char* name) {
    PyObject* found = ok_ ? PyDict_GetItemString(dict_, name) : nullptr;
    if (ok_ && found == nullptr) PyErr_Format(PyExc_KeyError, "%s", name);
    ok_ = found != nullptr;
    return Py_XNewRef(found);
  }
  PyTypeObject* type(const char* name) {
    PyObject* found = object(name);
    if (found != nullptr && !PyType_Check(found)) {
      PyErr_Format(PyExc_TypeError, "%s is no class", name);
      ok_ = false;
    }
    return reinterpret_cast<PyTypeObject*>(found);
  }
  void field(Field& field, const char* type, const char* name) {
    const Ref owner(object(type));
    ok_ = ok_ && field.find(owner.get(), name);
  }
  long number(const char* name) {
    const Ref found(object(name));
    const long value = found ? PyLong_AsLong(found.get()) : -1;
    ok_ = ok_ && !(value == -1 && PyErr_Occurred());
    return value;
  }
  bool ok() const { return ok_; }

 private:
  PyObject* dict_;
  bool ok_ = true;
};

void find_fields(Given& given) {
  Parts& p = parts;
  given.field(p.timeline_.busy, "Timeline", "busy");
  given.field(p.timeline_.by_id, "Timeline", "_by_id");
  given.field(p.timeline_.captures, "Timeline", "captures");
  given.field(p.timeline_.clocks, "Timeline", "clocks");
  given.field(p.timeline_.current_key, "Timeline", "current_key");
  given.field(p.timeline_.driver, "Timeline", "driver");
  given.field(p.timeline_.explanations, "Timeline", "explanations");
  given.field(p.timeline_.fences, "Timeline", "fences");
  given.field(p.timeline_.lock, "Timeline", "lock");
  given.field(p.timeline_.refusal, "Timeline", "refusal");
  given.field(p.timeline_.state, "Timeline", "state");
  given.field(p.timeline_.streams, "Timeline", "_streams");
  given.field(p.clocks_.host, "Clocks", "host");
  given.field(p.event_.handle, "Event", "handle");
  given.field(p.event_.covered, "Event", "covered");
  given.field(p.event_.epoch, "Event", "epoch");
  given.field(p.stream_.key, "Stream", "key");
  given.field(p.stream_.id, "Stream", "id");
  given.field(p.stream_.capture, "Stream", "capture");
  given.field(p.stream_.clock, "Stream", "clock");
  given.field(p.stream_.exact, "Stream", "exact");
  given.field(p.stream_.last, "Stream", "last");
  given.field(p.holding_.stream, "Holding", "stream");
  given.field(p.holding_.held, "Holding", "held");
  given.field(p.lease_.block, "Lease", "_block");
  given.field(p.lease_.provider, "Lease", "_provider");
  given.field(p.lease_.state, "Lease", "_state");
  given.field(p.lease_.tensors, "Lease", "_tensors");
  given.field(p.lease_.request, "Lease", "request");
  given.field(p.lease_.workspace, "Lease", "workspace");
  given.field(p.lease_.t0, "Lease", "_t0");
  given.field(p.lease_.t1, "Lease", "_t1");
  given.field(p.lease_.t2, "Lease", "_t2");
  given.field(p.lazy_.homes, "LazyLease", "_homes");
  given.field(p.lazy_.made, "LazyLease", "_made");
  given.field(p.request_.direct, "Request", "direct");
  given.field(p.request_.dims, "Request", "dims");
  given.field(p.request_.extents, "Request", "extents");
  given.field(p.request_.key, "Request", "key");
  given.field(p.request_.lead, "Request", "lead");
  given.field(p.request_.lender, "Request", "lender");
  given.field(p.request_.nbytes, "Request", "nbytes");
  given.field(p.request_.noted, "Request", "noted");
  given.field(p.request_.notes, "Request", "notes");
  given.field(p.request_.owner, "Request", "owner");
  given.field(p.request_.shelves, "Request", "shelves");
  given.field(p.request_.sizes, "Request", "sizes");
  given.field(p.request_.align, "Request", "align");
  given.field(p.request_.lease_type, "Request", "lease_type");
  given.field(p.request_.positions, "Request", "_positions");
  given.field(p.request_.ready, "Request", "ready");
  given.field(p.request_.timeline, "Request", "timeline");
  given.field(p.request_.zero, "Request", "zero");
  given.field(p.block_.epoch, "Block", "epoch");
  given.field(p.block_.first, "Block", "first");
  given.field(p.block_.lent, "Block", "lent");
  given.field(p.block_.nbytes, "Block", "nbytes");
  given.field(p.block_.offset, "Block", "offset");
  given.field(p.block_.request, "Block", "request");
  given.field(p.block_.site, "Block", "site");
  given.field(p.block_.shelf, "Block", "shelf");
  given.field(p.block_.slab, "Block", "slab");
  given.field(p.block_.stream, "Block", "stream");
  given.field(p.block_.views, "Block", "views");
  given.field(p.shelf_.blocks, "Shelf", "blocks");
  given.field(p.pool_.elided, "Pool", "elided");
  given.field(p.pool_.hands_over, "Pool", "hands_over");
  given.field(p.pool_.largest, "Pool", "_largest");
  given.field(p.pool_.longer, "Pool", "_longer");
  given.field(p.pool_.refits, "Pool", "refits");
  given.field(p.pool_.shelves, "Pool", "shelves");
  given.field(p.sizes_.shelves, "Sizes", "shelves");
  given.field(p.slab_.address, "Slab", "address");
  given.field(p.slab_.views, "Slab", "views");
  given.field(p.fork_.branches, "Fork", "_branches");
  given.field(p.fork_.elsewhere, "Fork", "_elsewhere");
  given.field(p.fork_.flagged, "Fork", "_flagged");
  given.field(p.fork_.foreign, "Fork", "_foreign");
  given.field(p.fork_.held, "Fork", "_held");
  given.field(p.fork_.parent, "Fork", "_parent");
  given.field(p.fork_.timeline, "Fork", "_timeline");
  given.field(p.branch_.before, "Branch", "_before");
  given.field(p.branch_.driver, "Branch", "_driver");
  given.field(p.branch_.key, "Branch", "_key");
  given.field(p.layout_.latest, "Layout", "latest");
  given.field(p.extent_.shape, "Extent", "shape");
  given.field(p.extent_.dtype, "Extent", "dtype");
  given.field(p.extent_.nbytes, "Extent", "nbytes");
}

}  // namespace

bool bind(PyObject* dict, PyObject* inlined) {
  Given given(dict);
  Parts& p = parts;
  find_fields(given);
  p.timeline = given.type("Timeline");
  p.clocks = given.type("Clocks");
  p.event = given.type("Event");
  p.stream = given.type("Stream");
  p.layout = given.type("Layout");
  p.holding = given.type("Holding");
  p.lease = given.type("Lease");
  p.lazy = given.type("LazyLease");
  p.fork = given.type("Fork");
  p.branch = given.type("Branch");
  p.slot = given.type("Slot");
  p.shelf = given.type("Shelf");
  p.block = given.type("Block");
  p.caching = given.type("Caching");
  p.upstream = given.type("Upstream");
  p.driver_error = given.object("DriverError");
  p.workspace_error = given.object("WorkspaceError");
  p.modes = given.object("modes");
  p.grad_enabled = given.object("grad_enabled");
  p.idle = given.object("IDLE");
  p.plain = given.object("PLAIN");
  p.forked = given.object("FORKED");
  p.plain_value = given.number("PLAIN");
  p.looked_up = given.number("LOOKED_UP");
  p.one_in = given.number("ONE_IN");
  if (!given.ok()) return false;

  const Ref pairs(PySequence_Fast(inlined, "the inlined methods are (class, name) pairs"));
  if (!pairs) return false;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(pairs.get()); ++index) {
    PyObject *type, *name;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(pairs.get(), index), "OU", &type, &name)) return false;
    if (!p.inlined.add(type, name)) return false;
  }
  p.bound = true;
  return true;
}

}  // namespace workspace

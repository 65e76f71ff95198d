#include "handover.h"

#include "methods.h"
#include "order.h"

namespace workspace {

namespace {

// What one hand-over works on.
struct Handover {
  Ref request, pool, stream;
  Order::View view;
};

// A block on a shelf.
struct Place {
  PyObject* shelf = nullptr;  // borrowed: it outlives the search, during which no Python runs
  Py_ssize_t at = -1;
  bool ordered = false;
};

// Whether the lock is to be taken at all. An exception may be set.
bool may_look(const Ref& request, const Ref& timeline) {
  const Ref pool = parts.request_.lender.get(request);
  if (!is_true(parts.pool_.hands_over.get(pool)) || !is_true(parts.request_.direct.get(request))) return false;
  return parts.inlined.intact() && outside_the_lock(timeline) > 0;
}

// Fills in the rest; false where another way is to be gone. An exception may be set.
bool found(Handover& on, Order& order, const Ref& key) {
  on.pool = parts.request_.lender.get(on.request);
  on.stream = order.of(key);
  if (!on.stream || !parts.stream_.capture.get(on.stream).is(Py_None) ||
      !parts.stream_.exact.get(on.stream).is(Py_False)) {
    return false;
  }
  Ref largest = parts.pool_.largest.get(on.pool);
  if (largest.is(Py_None)) largest = call_method(names.largest, on.pool.get());
  const Ref nbytes = parts.request_.nbytes.get(on.request);
  if (!is_true(parts.pool_.hands_over.get(on.pool)) || !largest || !nbytes || !PyLong_CheckExact(largest.get())) {
    return false;
  }
  if (less(largest, nbytes) <= 0) return false;
  on.view = order.view(on.stream);
  return on.view.clock != nullptr;
}

// The first block on a shelf whose use precedes the stream's next work; -1: none, -2 with an exception set.
Py_ssize_t ordered_on(const Handover& on, PyObject* shelf) {
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(shelf); ++at) {
    PyObject* const block = PyList_GET_ITEM(shelf, at);
    if (!Py_IS_TYPE(block, parts.block)) continue;
    PyObject *const owner = parts.block_.stream.peek(block), *const epoch = parts.block_.epoch.peek(block);
    if (owner == nullptr || !Py_IS_TYPE(owner, parts.stream) || epoch == nullptr) continue;
    PyObject* const used = parts.stream_.clock.peek(owner);
    const long long until = PyLong_AsLongLong(epoch);
    const int ordered = Clock::is_one(used) && !PyErr_Occurred() ? on.view.ordered(*Clock::of(used), until) : -1;
    if (ordered != 0) return ordered < 0 ? -2 : at;
  }
  return -1;
}

// Whether any block on any shelf of the pool is ordered; -1 with an exception set.
int any_ordered(const Handover& on) {
  const Ref shelves = parts.pool_.shelves.get(on.pool);
  PyObject *shelf, *none;
  for (Py_ssize_t next = 0; shelves && PyDict_Next(shelves.get(), &next, &shelf, &none);) {
    if (!PyList_Check(shelf) || PyList_GET_SIZE(shelf) == 0) continue;
    const Py_ssize_t at = ordered_on(on, shelf);
    if (at != -1) return at < 0 ? -1 : 1;
  }
  return shelves ? 0 : 1;
}

// One that is ordered, else the last of a shelf where none on any is; no shelf where another way is to be gone. An
// exception may be set.
Place chosen(const Handover& on) {
  const Ref shelves = parts.request_.shelves.get(on.request);
  if (!shelves || !PyDict_CheckExact(shelves.get())) return Place();
  const int any = any_ordered(on);  // those of the request are among the pool's
  if (any < 0) return Place();
  PyObject *key, *shelf;
  for (Py_ssize_t next = 0; PyDict_Next(shelves.get(), &next, &key, &shelf);) {
    if (!PyList_Check(shelf) || PyList_GET_SIZE(shelf) == 0) continue;
    if (!any) return Place{shelf, PyList_GET_SIZE(shelf) - 1, false};
    const Py_ssize_t at = ordered_on(on, shelf);
    if (at != -1) return at < 0 ? Place() : Place{shelf, at, true};
  }
  return Place();
}

// Adds one to a number in a slot. False with an exception set.
bool add(const Field& to, PyObject* of, long one) {
  PyObject* const before = to.peek(of);
  const long long value = before != nullptr ? PyLong_AsLongLong(before) : 0;
  if (value == -1 && PyErr_Occurred()) return false;
  Ref after(PyLong_FromLongLong(value + one));
  if (!after) return false;
  to.set(of, std::move(after));
  return true;
}

// Adds one to a tally. False with an exception set.
bool count(PyObject* tally) {
  const long long value = PyLong_AsLongLong(PyList_GET_ITEM(tally, 0));
  if (value == -1 && PyErr_Occurred()) return false;
  PyObject* const after = PyLong_FromLongLong(value + 1);
  return after != nullptr && PyList_SetItem(tally, 0, after) == 0;
}

bool is_tally(PyObject* one) { return PyList_CheckExact(one) && PyList_GET_SIZE(one) == 1; }

// Whether the next fence is counted where the last was, without a look: `workspace.explain.ONE_IN`.
bool stands_for_it(PyObject* tally) {
  const long times = PyLong_AsLong(PyList_GET_ITEM(tally, 0));
  return times >= parts.looked_up && times % parts.one_in != 0;
}

// Where a fence at this instruction, for these two, is counted; empty where it is not known. No exception is set.
Ref noted(const Ref& request, const Ref& other, const Ref& site) {
  PyObject* const last = parts.request_.noted.peek(request.get());
  if (last != nullptr && is_tally(last) && stands_for_it(last)) return Ref::of(last);
  const Ref notes = parts.request_.notes.get(request);
  PyFrameObject* const frame = PyEval_GetFrame();  // borrowed
  if (frame == nullptr || !notes || !PyList_Check(notes.get())) return Ref();
  const Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const int instruction = PyFrame_GetLasti(frame);
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(notes.get()); ++at) {
    PyObject* const note = PyList_GET_ITEM(notes.get(), at);
    if (!PyTuple_CheckExact(note) || PyTuple_GET_SIZE(note) != 5 || !code.is(PyTuple_GET_ITEM(note, 0))) continue;
    if (!other.is(PyTuple_GET_ITEM(note, 2)) || !site.is(PyTuple_GET_ITEM(note, 3))) continue;
    PyObject* const tally = PyTuple_GET_ITEM(note, 4);
    if (!is_tally(tally) || PyLong_AsLong(PyTuple_GET_ITEM(note, 1)) != instruction) continue;
    parts.request_.noted.set(request.get(), Ref::of(tally));
    return Ref::of(tally);
  }
  return Ref();
}

// `Explanations.fence`. False with an exception set.
bool explain(const Ref& timeline, const Handover& on, const Ref& block, const Ref& owner, const Ref& knows) {
  const Ref explanations = parts.timeline_.explanations.get(timeline);
  const Ref needs = parts.block_.epoch.get(block);
  if (!explanations) return true;
  return needs && call_method(names.fence, explanations.get(), on.request.get(), block.get(), on.stream.get(),
                              owner.get(), needs.get(), knows.get());
}

// How much the stream has seen of another. Empty with an exception set.
Ref known(const Handover& on, const Ref& owner) {
  const Clock* const of = Order::clock(owner);
  const Seen* const seen = of != nullptr ? on.view.clock->known() : nullptr;
  return Ref(seen != nullptr ? PyLong_FromLongLong(seen->get(of->id)) : nullptr);
}

// Makes the stream's next work come after the block's use. 0 where the Python form has to look, -1 with an exception
// set.
int fenced(Order& order, const Ref& timeline, const Handover& on, const Ref& block) {
  const Ref epoch = parts.block_.epoch.get(block), owner = parts.block_.stream.get(block);
  if (!epoch || !parts.stream_.capture.get(owner).is(Py_None)) return 0;
  const Ref other = parts.request_.owner.get(parts.block_.request.get(block)), site = parts.block_.site.get(block);
  const Ref tally = noted(on.request, other, site);
  const Ref knows = tally ? Ref() : known(on, owner);  // before the fence
  if (!tally && !knows) return -1;
  const int done = order.fence(owner, epoch, on.stream);
  if (done != 1) return done;
  if (!add(parts.timeline_.fences, timeline.get(), 1)) return -1;
  return (tally ? count(tally.get()) : explain(timeline, on, block, owner, knows)) ? 1 : -1;
}

// Counts a use that needed no fence, unless it is the stream's own. 1, or -1 with an exception set.
int elided(const Handover& on, const Ref& block) {
  if (parts.block_.stream.holds(block.get(), on.stream.get())) return 1;
  return add(parts.pool_.elided, on.pool.get(), 1) ? 1 : -1;
}

}  // namespace

bool kept(const Ref& pool, const Ref& request, const Ref& stream, const Ref& block, const Ref& key) {
  Ref shelf = item(parts.request_.shelves.get(request), key);
  if (!shelf) {
    if (!PyErr_Occurred()) shelf = call_method(names.keep, request.get(), block.get(), stream.get());
    if (!shelf) return false;
  } else {
    const Ref before = parts.block_.shelf.exchange(block.get(), Ref::of(shelf.get()));
    if (!Py_IS_TYPE(shelf.get(), parts.shelf) || !Py_IS_TYPE(before.get(), parts.shelf)) {
      PyErr_SetString(PyExc_TypeError, "a shelf of the request is none");
      return false;
    }
    if (!add(parts.shelf_.blocks, before.get(), -1) || !add(parts.shelf_.blocks, shelf.get(), 1)) return false;
    parts.block_.stream.set(block.get(), Ref::of(stream.get()));
  }
  const Ref shelves = parts.pool_.shelves.get(pool);
  return shelves && PyDict_SetItem(shelves.get(), shelf.get(), Py_None) == 0;
}

bool may_be_held(const Ref& block) {
  const Ref first = parts.block_.first.get(block);
  return first && PyTuple_CheckExact(first.get()) && PyTuple_GET_SIZE(first.get()) == 3;
}

Ref handed_over(const Ref& request, const Ref& timeline, const Ref& key) {
  if (!may_look(request, timeline)) return Ref();
  Handover on{Ref::of(request.get()), Ref(), Ref(), Order::View()};
  Order order(timeline);
  Locked locked(timeline);
  if (!locked || !order || !steady(timeline) || !found(on, order, key)) return Ref();
  const Place place = chosen(on);
  if (place.shelf == nullptr) return Ref();
  const Ref shelf = Ref::of(place.shelf);
  Ref block = Ref::of(PyList_GET_ITEM(shelf.get(), place.at));
  if (!may_be_held(block) || PyList_SetSlice(shelf.get(), place.at, place.at + 1, nullptr)) return Ref();
  const int ready = place.ordered ? elided(on, block) : fenced(order, timeline, on, block);
  if (ready == 1) return kept(on.pool, on.request, on.stream, block, key) && locked.unlock() ? std::move(block) : Ref();
  // Back to where it was. An error of the device goes on.
  Ref error = taken_error();
  if (PyList_Append(shelf.get(), block.get())) return Ref();
  if (error) raise(std::move(error));
  return Ref();
}

}  // namespace workspace

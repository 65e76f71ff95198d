#include "refit.h"

#include "handover.h"
#include "methods.h"
#include "order.h"

namespace workspace {

namespace {

// What one change of dims works on.
struct Refit {
  Ref request, pool, stream, shelves;
  long long nbytes = 0;
};

// The block that a lease is to get, the last of a shelf, and its tensors for the request: none where Python has to make
// them, or more than a few shelves are to be left first.
struct Fitting {
  PyObject* shelf = nullptr;  // borrowed: it outlives the search, during which no Python runs
  Ref tensors;
};

// Shelves that no block is on or comes back to, of which the Python form makes an end.
constexpr int FEW = 8;

// Whether the lock is to be taken at all. An exception may be set.
bool may_look(const Ref& request, const Ref& timeline) {
  const Ref pool = parts.request_.lender.get(request);
  if (!is_true(parts.pool_.refits.get(pool)) || !is_true(parts.request_.direct.get(request))) return false;
  return parts.inlined.intact() && outside_the_lock(timeline) > 0;
}

// A number in a slot; -1, without an exception, where there is none.
long long number(const Field& field, PyObject* of) {
  PyObject* const found = field.peek(of);
  return found != nullptr && PyLong_CheckExact(found) ? PyLong_AsLongLong(found) : -1;
}

// Fills in the rest; false where another way is to be gone. An exception may be set.
bool found(Refit& on, const Ref& timeline, const Ref& key) {
  on.pool = parts.request_.lender.get(on.request);
  on.stream = Order(timeline).of(key);
  on.shelves = item(parts.sizes_.shelves.get(parts.request_.sizes.get(on.request)), key);
  on.nbytes = number(parts.request_.nbytes, on.request.get());
  return is_true(parts.pool_.refits.get(on.pool)) && parts.stream_.capture.get(on.stream).is(Py_None) && on.shelves &&
         PyDict_CheckExact(on.shelves.get()) && on.nbytes > 0;
}

// The tensors that were built for the request where the block lies.
Ref built(const Refit& on, PyObject* block) {
  const Ref views = parts.slab_.views.get(parts.block_.slab.get(block));
  const Ref offset = parts.block_.offset.get(block);
  const Ref place(offset ? PyTuple_Pack(2, offset.get(), on.request.get()) : nullptr);
  Ref found = item(views, place);
  return found && PyList_CheckExact(found.get()) ? std::move(found) : Ref();
}

// `Sizes.take`, as far as to the choice. An exception may be set.
Fitting chosen(const Refit& on) {
  PyObject *shelf, *none, *best = nullptr;
  long long smallest = 0;
  int left = 0;
  for (Py_ssize_t next = 0; PyDict_Next(on.shelves.get(), &next, &shelf, &none);) {
    if (!Py_IS_TYPE(shelf, parts.shelf)) return Fitting();
    left += number(parts.shelf_.blocks, shelf) == 0;
    const Py_ssize_t last = PyList_GET_SIZE(shelf) - 1;
    if (last < 0 || !Py_IS_TYPE(PyList_GET_ITEM(shelf, last), parts.block)) continue;
    const long long held = number(parts.block_.nbytes, PyList_GET_ITEM(shelf, last));
    if (held >= on.nbytes && (best == nullptr || held < smallest)) {
      best = shelf;
      smallest = held;
    }
  }
  if (best == nullptr) return Fitting();
  if (left > FEW) return Fitting{best, Ref()};
  return Fitting{best, built(on, PyList_GET_ITEM(best, PyList_GET_SIZE(best) - 1))};
}

// The first three tensors, as a lease keeps them; None where there are fewer.
Ref first_three(const Ref& tensors) {
  Ref first(PyTuple_New(3));
  for (Py_ssize_t at = 0; first && at < 3; ++at) {
    PyObject* const one = at < PyList_GET_SIZE(tensors.get()) ? PyList_GET_ITEM(tensors.get(), at) : Py_None;
    PyTuple_SET_ITEM(first.get(), at, Py_NewRef(one));
  }
  return first;
}

// Makes the block the request's. False with an exception set.
bool lend(const Refit& on, const Ref& block, Ref tensors) {
  Ref views(PyDict_New()), first = first_three(tensors);
  if (!views || !first || PyDict_SetItem(views.get(), on.request.get(), tensors.get())) return false;
  parts.block_.request.set(block.get(), Ref::of(on.request.get()));
  parts.block_.views.set(block.get(), std::move(views));
  parts.block_.first.set(block.get(), std::move(first));
  parts.block_.lent.set(block.get(), std::move(tensors));
  return true;
}

// Takes a key out of a dict that may lack it. False with an exception set.
bool drop(const Ref& from, PyObject* key) {
  const int there = from ? PyDict_Contains(from.get(), key) : 0;
  return there == 0 || (there > 0 && PyDict_DelItem(from.get(), key) == 0);
}

// Notes who used last what the block has beyond the request. False with an exception set.
bool note_beyond(const Refit& on, const Ref& block) {
  const Ref longer = parts.pool_.longer.get(on.pool);
  if (!longer) return false;
  if (number(parts.block_.nbytes, block.get()) <= on.nbytes) return drop(longer, block.get());
  const Ref id = parts.stream_.id.get(on.stream), epoch = parts.block_.epoch.get(block);
  const Ref uses(PyDict_New());
  return uses && id && epoch && PyDict_SetItem(uses.get(), id.get(), epoch.get()) == 0 &&
         PyDict_SetItem(longer.get(), block.get(), uses.get()) == 0;
}

// `Pool.refitted`. False with an exception set.
bool note(const Refit& on, const Ref& block, const Ref& before) {
  const Ref shelf = parts.block_.shelf.get(block);
  if (!note_beyond(on, block) || PyDict_SetItem(on.shelves.get(), shelf.get(), Py_None)) return false;
  return number(parts.shelf_.blocks, before.get()) != 0 || drop(parts.pool_.shelves.get(on.pool), before.get());
}

}  // namespace

Ref refitted(const Ref& request, const Ref& timeline, const Ref& key, bool& ask) {
  if (!may_look(request, timeline)) return Ref();
  Refit on{Ref::of(request.get()), Ref(), Ref(), Ref()};
  Locked locked(timeline);
  if (!locked || !steady(timeline) || !found(on, timeline, key)) return Ref();
  Fitting fitting = chosen(on);
  ask = fitting.shelf != nullptr && !fitting.tensors;
  if (!fitting.tensors) return Ref();
  const Ref shelf = Ref::of(fitting.shelf);
  const Py_ssize_t last = PyList_GET_SIZE(shelf.get()) - 1;
  Ref block = Ref::of(PyList_GET_ITEM(shelf.get(), last));
  if (PyList_SetSlice(shelf.get(), last, last + 1, nullptr)) return Ref();
  if (!lend(on, block, std::move(fitting.tensors)) || !kept(on.pool, on.request, on.stream, block, key)) return Ref();
  return note(on, block, shelf) && locked.unlock() ? std::move(block) : Ref();
}

}  // namespace workspace

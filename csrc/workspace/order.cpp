#include "order.h"

#include "methods.h"
#include "verbs.h"

namespace workspace {

Order::Order(const Ref& timeline)
    : timeline_(Ref::of(timeline.get())),
      driver_(parts.timeline_.driver.get(timeline)),
      clocks_(parts.timeline_.clocks.get(timeline)),
      by_key_(parts.timeline_.streams.get(timeline)) {}

Ref Order::current() {
  const Ref ask = parts.timeline_.current_key.get(timeline_);
  return ask ? item(by_key_, call(ask)) : Ref();
}

bool Order::find(Ref& verb, PyObject* name) {
  if (verb) return true;
  // A driver keeps its hot verbs in its own dict.
  if (!own_ && Py_TYPE(driver_.get())->tp_getattro == PyObject_GenericGetAttr) {
    own_ = Ref(PyObject_GenericGetDict(driver_.get(), nullptr));
    if (!own_) PyErr_Clear();
  }
  if (own_) verb = Ref::of(PyDict_GetItemWithError(own_.get(), name));
  if (!verb && !PyErr_Occurred()) verb = attribute(driver_, name);
  return static_cast<bool>(verb);
}

Ref Order::capture_of(const Ref& key) {
  if (!find(capture_of_, names.capture_of) || !key) return Ref();
  const Ref identity = call(capture_of_.get(), key.get());
  const int captures = identity ? PyObject_IsTrue(identity.get()) : (failed(), -1);
  if (captures < 0) return Ref();
  return captures ? item(parts.timeline_.captures.get(timeline_), identity) : Ref::of(Py_None);
}

Clock* Order::clock(const Ref& stream) {
  const Ref found = parts.stream_.clock.get(stream);
  if (Clock::is_one(found.get())) return Clock::of(found.get());  // the stream keeps it
  PyErr_SetString(PyExc_TypeError, "a stream of the timeline has no clock");
  return nullptr;
}

Ref Order::epoch(const Ref& stream) {
  const Clock* const found = clock(stream);
  return Ref(found != nullptr ? PyLong_FromLongLong(found->epoch) : nullptr);
}

bool Order::failed() {
  if (PyErr_ExceptionMatches(parts.driver_error)) {
    Ref error = taken_error();
    if (call_method(names.note, timeline_.get(), error.get())) raise(std::move(error));
  }
  return false;
}

// Calls the driver's record or wait. False with an exception set.
bool Order::enqueue(Ref& verb, PyObject* name, const Ref& event, const Ref& stream) {
  const Ref handle = parts.event_.handle.get(event), key = parts.stream_.key.get(stream);
  if (!handle || !key) {
    PyErr_SetString(PyExc_TypeError, "an event or a stream of the timeline is none");
    return false;
  }
  return find(verb, name) && (call(verb.get(), handle.get(), key.get()) || failed());
}

// Before the device's record: a use stamped by another thread in between carries the next epoch. No event with an
// exception set.
Order::Record Order::close_epoch(const Ref& stream, Ref event) {
  if (!event) event = parts.stream_.last.get(stream);
  if (event.is(Py_None)) {
    event = call_method(names.new_event, timeline_.get());
    if (!event) return Record();
    parts.stream_.last.set(stream.get(), Ref::of(event.get()));
  }
  Clock* const from = clock(stream);
  const Seen* const seen = from != nullptr ? from->known() : nullptr;
  if (seen == nullptr) return Record();
  Ref covered = seen->copy(), epoch(PyLong_FromLongLong(from->epoch));
  if (!covered || !epoch || !Seen::of(covered)->set(from->id, from->epoch)) return Record();
  ++from->epoch;
  return Record{std::move(event), std::move(covered), std::move(epoch)};
}

// After the device's record.
Ref Order::recorded(Record record) {
  parts.event_.covered.set(record.event.get(), std::move(record.covered));
  parts.event_.epoch.set(record.event.get(), std::move(record.epoch));
  return std::move(record.event);
}

Ref Order::record(const Ref& stream) { return record(stream, Ref()); }

Ref Order::record(const Ref& stream, Ref event) {
  Record record = close_epoch(stream, std::move(event));
  if (!record.event || !enqueue(record_, names.record, record.event, stream)) return Ref();
  return recorded(std::move(record));
}

int Order::fence(const Ref& owner, const Ref& epoch, const Ref& stream) {
  const Ref last = parts.stream_.last.get(owner), covers = parts.event_.epoch.get(last);
  if (!covers) return fence_now(owner, stream);
  const int early = less(covers, epoch);
  if (early != 0) return early < 0 ? -1 : fence_now(owner, stream);
  return wait(last, stream) ? 1 : -1;
}

int Order::fence_now(const Ref& owner, const Ref& stream) {
  if (!find(capture_of_, names.capture_of) || !find(record_, names.record) || !find(wait_, names.wait)) return -1;
  const Ref from = parts.stream_.key.get(owner), to = parts.stream_.key.get(stream);
  Clock *const of = clock(owner), *const by = clock(stream);
  if (!from || !to || of == nullptr || by == nullptr) return of == nullptr || by == nullptr ? -1 : 0;
  Together together(capture_of_.get(), record_.get(), wait_.get(), {of, from.get()}, {by, to.get()});
  if (!together) {
    const Ref captures = call(capture_of_.get(), from.get());
    const int is_so = captures ? PyObject_IsTrue(captures.get()) : (failed(), -1);
    if (is_so != 0) return is_so < 0 ? -1 : 0;
    const Ref event = record(owner);
    return event && wait(event, stream) ? 1 : -1;
  }
  Record record = close_epoch(owner);
  if (!record.event) return -1;
  const Ref handle = parts.event_.handle.get(record.event);
  const Together::Done done = together.run(handle.get());
  // What has failed is done again by the verb, which says what is wrong.
  if (done == Together::CAPTURES) return 0;
  if (done == Together::NOTHING && !enqueue(record_, names.record, record.event, owner)) return -1;
  const Ref event = recorded(std::move(record));
  if (done != Together::ALL) return wait(event, stream) ? 1 : -1;
  return learn(stream, parts.event_.covered.get(event)) ? 1 : -1;
}

bool Order::wait(const Ref& event, const Ref& stream) {
  if (!enqueue(wait_, names.wait, event, stream)) return false;
  return learn(stream, parts.event_.covered.get(event));
}

bool Order::learn(const Ref& stream, const Ref& covered) {
  Clock* const by = clock(stream);
  const Seen* const before = by != nullptr ? by->known() : nullptr;
  if (before == nullptr) return false;
  if (!Seen::is_one(covered.get())) {
    PyErr_SetString(PyExc_TypeError, "what an event covers is of another kind");
    return false;
  }
  // What is seen, or covered, never changes in place: the stream shares it with the event, which knows at least as much
  // where it comes after all that the stream has waited for.
  Ref now = Ref::of(covered.get());
  if (Seen::of(covered)->get(by->id) < by->waited) {
    now = Seen::of(covered)->copy();
    if (!now || !Seen::of(now)->merge(*before)) return false;
  }
  const Ref old(std::exchange(by->seen, now.release()));
  by->waited = by->epoch;
  return true;
}

Order::View Order::view(const Ref& stream) const {
  PyObject* const host = parts.clocks_.host.get(clocks_).get();
  if (Seen::is_one(host)) return View{clock(stream), Seen::of(host)};
  PyErr_SetString(PyExc_TypeError, "what the host has seen is of another kind");
  return View();
}

int Order::View::ordered(const Clock& used, long long epoch) const {
  if (&used == clock) return 1;
  const Seen* const seen = clock->known();
  if (seen == nullptr) return -1;
  return seen->get(used.id) >= epoch || host->get(used.id) >= epoch;
}

namespace {

enum { RECORD, WAIT };

bool is_stream(PyObject* one) { return Py_IS_TYPE(one, parts.stream); }
bool is_event(PyObject* one) { return Py_IS_TYPE(one, parts.event); }

// Whether the C++ knows the timeline, and what it calls inline.
bool known(PyObject* timeline) { return Py_IS_TYPE(timeline, parts.timeline) && parts.inlined.intact(); }

PyObject* record(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const bool own = count == 1 || (count == 2 && arguments[1] == Py_None);
  const bool fits = own || (count == 2 && is_event(arguments[1]));
  if (!fits || !is_stream(arguments[0]) || !known(self)) return python(order_methods[RECORD], self, arguments, count);
  Order order(Ref::of(self));
  if (!order) return python(order_methods[RECORD], self, arguments, count);
  return order.record(Ref::of(arguments[0]), own ? Ref() : Ref::of(arguments[1])).release();
}

PyObject* wait(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !is_event(arguments[0]) || !is_stream(arguments[1]) || !known(self)) {
    return python(order_methods[WAIT], self, arguments, count);
  }
  Order order(Ref::of(self));
  if (!order) return python(order_methods[WAIT], self, arguments, count);
  if (!order.wait(Ref::of(arguments[0]), Ref::of(arguments[1]))) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace

Native order_methods[] = {
    {"Timeline", {"record", WORKSPACE_FUNCTION(record), METH_FASTCALL, nullptr}, nullptr},
    {"Timeline", {"wait", WORKSPACE_FUNCTION(wait), METH_FASTCALL, nullptr}, nullptr},
    {nullptr, {}, nullptr},
};

}  // namespace workspace

// `Timeline.current`, `record` and `wait` with the clocks' part of them, as on a timeline that is steady.
#pragma once

#include "parts.h"

namespace workspace {

// What a fork or an allocation asks of a timeline again and again, looked up once.
class Order {
 public:
  explicit Order(const Ref& timeline);
  // Whether the timeline has all of it.
  explicit operator bool() const { return driver_ && clocks_ && by_key_; }

  // The caller's current stream. Empty without an exception when the timeline has not seen it yet.
  Ref current();
  // An event, the stream's own, that covers everything enqueued on it so far.
  Ref record(const Ref& stream);
  // Makes the stream's later work wait for the event. False with an exception set.
  bool wait(const Ref& event, const Ref& stream);
  // Whether work enqueued now on `stream` (an id) comes after the use; -1 with an exception set.
  int ordered(const Ref& stream, const Ref& used, const Ref& epoch);

  // The stream's current epoch.
  Ref epoch(const Ref& stream);
  const Ref& driver() const { return driver_; }
  const Ref& timeline() const { return timeline_; }

 private:
  bool failed();
  bool enqueue(Ref& verb, PyObject* name, const Ref& event, const Ref& stream);
  bool learn(const Ref& id, const Ref& covered);

  Ref timeline_, driver_, clocks_, by_key_;
  Ref record_, wait_;  // the driver's verbs, from the first use on
};

}  // namespace workspace

// `Timeline.current`, `record` and `wait` with the clocks' part of them, as on a timeline that is steady.
#pragma once

#include "clock.h"
#include "parts.h"

namespace workspace {

// What a fork or an allocation asks of a timeline again and again, looked up once.
class Order {
 public:
  explicit Order(const Ref& timeline);
  // Whether the timeline has all of it.
  explicit operator bool() const { return driver_ && clocks_ && by_key_; }

  // What precedes a stream's next work. The stream and the timeline are to outlive it.
  struct View {
    Clock* clock = nullptr;
    const Seen* host = nullptr;
    // Whether a use of another does; -1 with an exception set.
    int ordered(const Clock& used, long long epoch) const;
  };
  // No clock with an exception set.
  View view(const Ref& stream) const;

  // The caller's current stream, as it is outside captures. Empty without an exception when the timeline has not seen it
  // yet.
  Ref current();
  // The open capture that a stream's key is part of; None where it is in none. Empty, without an exception, where the
  // library was not told of it.
  Ref capture_of(const Ref& key);
  // The stream of a key, as it is outside captures. Empty without an exception when the timeline has not seen it yet.
  Ref of(const Ref& key) const { return item(by_key_, key); }
  // An event, the stream's own, that covers everything enqueued on it so far.
  Ref record(const Ref& stream);
  Ref record(const Ref& stream, Ref event);
  // Makes a stream's later work come after a use of another: by that one's last event where it covers the epoch, else
  // by one recorded now. 0 where it cannot be, as the other captures; -1 with an exception set.
  int fence(const Ref& owner, const Ref& epoch, const Ref& stream);
  // Makes the stream's later work wait for the event. False with an exception set.
  bool wait(const Ref& event, const Ref& stream);
  // The stream's clock; null with an exception set.
  static Clock* clock(const Ref& stream);
  // The stream's current epoch.
  static Ref epoch(const Ref& stream);
  // Notes the error that a verb of the driver has raised. False for the caller to return.
  bool failed();
  const Ref& driver() const { return driver_; }
  const Ref& timeline() const { return timeline_; }

 private:
  bool enqueue(Ref& verb, PyObject* name, const Ref& event, const Ref& stream);
  bool learn(const Ref& stream, const Ref& covered);
  // The stream's own event, and what a record on it now will cover.
  struct Record {
    Ref event, covered, epoch;
  };
  Record close_epoch(const Ref& stream, Ref event = Ref());
  Ref recorded(Record record);
  int fence_now(const Ref& owner, const Ref& stream);

  // A verb of the driver, looked up at the first use. False with an exception set.
  bool find(Ref& verb, PyObject* name);

  Ref timeline_, driver_, clocks_, by_key_, own_;
  Ref record_, wait_, capture_of_;  // the driver's verbs, from the first use on
};

}  // namespace workspace

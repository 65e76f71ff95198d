// What the clocks know of a stream, for both forms: `workspace.clocks.Clock`, and a mapping of streams to epochs that
// costs less than a dict.
#pragma once

#include "ref.h"

namespace workspace {

// Stream id -> largest epoch ordered before. Once shared it never changes in place.
class Seen {
 public:
  struct Entry {
    long long stream, epoch;
  };

  static bool is_one(PyObject* object);
  static Seen* of(PyObject* object) { return reinterpret_cast<Seen*>(object); }
  static Seen* of(const Ref& object) { return of(object.get()); }
  // Empty with an exception set.
  static Ref make();
  Ref copy() const;

  // 0 for what is not seen: epochs begin at 1.
  long long get(long long stream) const;
  // False with an exception set.
  bool set(long long stream, long long epoch);
  // Keeps the larger epoch of each stream. False with an exception set.
  bool merge(const Seen& other);

  PyObject_HEAD
  Py_ssize_t size, room;
  Entry* entries;  // by stream; `few` as long as they fit
  Entry few[8];
};

class Clock {
 public:
  static bool is_one(PyObject* object);
  static Clock* of(PyObject* object) { return reinterpret_cast<Clock*>(object); }
  // What precedes the stream's next work; null, with an exception set, where it is no `Seen`.
  Seen* known() const;

  PyObject_HEAD
  long long id, epoch, waited;
  PyObject* seen;
  // The stream's handle, as a driver's dict of streams that are never destroyed has it, and that dict.
  PyObject* kept;
  void* handle;
};

// Adds the types to the module. False with an exception set.
bool add_clocks(PyObject* module);

}  // namespace workspace

// The timeline's lock: as threading.RLock, at the price of a comparison where nobody else has it.
#pragma once

#include "ref.h"

namespace workspace {

// Under the interpreter's lock a look at the owner is enough; only who has to wait calls the operating system.
class Lock {
 public:
  static bool is_one(PyObject* object);
  static Lock* of(PyObject* object) { return reinterpret_cast<Lock*>(object); }

  bool owned() const;
  // False with an exception set: a signal's handler has raised one.
  bool acquire();
  // False with an exception set: it is not this thread's.
  bool release();

  PyObject_HEAD
  unsigned long owner;
  unsigned long depth;  // of the owner's acquires; 0: free
  unsigned long waiting;
  PyThread_type_lock gate;  // shut, but where a release lets one of those that wait look again
  bool open;
};

// A timeline's lock, of either kind, for as long as this lives.
class Locked {
 public:
  explicit Locked(const Ref& timeline);
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked();
  explicit operator bool() const { return held_; }
  // At the end of what went well. False with an exception set.
  bool unlock();

 private:
  Ref lock_;
  bool held_ = false;
};

// Whether this thread is not inside the timeline's lock already; -1 with an exception set.
int outside_the_lock(const Ref& timeline);

// Adds the type to the module. False with an exception set.
bool add_lock(PyObject* module);

}  // namespace workspace

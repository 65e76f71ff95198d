// The verbs of a driver that every fork and fence makes, as callables without a Python frame or ctypes in between.
#pragma once

#include "clock.h"

namespace workspace {

// A fence's calls of the driver, where its verbs are these and the streams live for good: made one after the other
// without the interpreter's lock.
class Together {
 public:
  // A stream by its clock and its key.
  struct Of {
    Clock* clock;
    PyObject* key;
  };
  // `from` is waited for, `to` waits.
  Together(PyObject* capture_of, PyObject* record, PyObject* wait, Of from, Of to);
  explicit operator bool() const { return known_; }

  enum Done { NOTHING, CAPTURES, RECORDED, ALL };
  // Asks whether the one stream captures, records the event (a handle) on it, and makes the other wait for it. No
  // exception is set: a call that failed is left undone.
  Done run(PyObject* event) const;

 private:
  bool known_ = false;
  void *capture_of_, *record_, *wait_, *from_, *to_;
};

// Adds the functions that make them to the module's. False with an exception set.
bool add_verbs(PyObject* module);

}  // namespace workspace

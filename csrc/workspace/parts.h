// What the native form needs of the Python one: its classes, where their slots lie, and the methods it stands for.
#pragma once

#include <vector>

#include "field.h"

namespace workspace {

// Methods that the C++ calls inline. While one of them is not what it was (a test has taken an edge out, say),
// everything goes the Python way.
class Inlined {
 public:
  bool add(PyObject* type, PyObject* name);
  // The method may also be this one, which does the same.
  void allow(PyObject* type, const char* name, PyObject* native);
  // Every method is as it was. Never raises.
  bool intact() {
    for (const Watched& one : types_) {
      // The interpreter gives a type a new tag whenever an attribute of it or of a base changes; 0 is none.
      if (one.type->tp_version_tag != one.tag || one.tag == 0) return compare();
    }
    return true;
  }

 private:
  struct Watched {
    PyTypeObject* type;
    unsigned int tag;
  };
  struct Original {
    PyObject *type, *name, *value, *native;
  };
  bool compare();

  std::vector<Watched> types_;
  std::vector<Original> originals_;
};

struct Parts {
  bool bound = false;
  Inlined inlined;

  // Classes; all references are kept for the life of the process.
  PyTypeObject *timeline, *clocks, *stream, *layout, *holding, *lease, *lazy, *fork, *branch, *slot, *caching, *upstream;
  PyTypeObject *block, *event, *shelf;
  PyObject *driver_error, *workspace_error, *modes, *grad_enabled;
  PyObject *idle, *plain, *forked;
  long plain_value, looked_up, one_in;

  struct { Field busy, by_id, captures, clocks, current_key, driver, explanations, fences, lock, refusal, state, streams; } timeline_;
  struct { Field host; } clocks_;
  struct { Field handle, covered, epoch; } event_;
  struct { Field key, id, capture, clock, exact, last; } stream_;
  struct { Field stream, held; } holding_;
  struct { Field block, provider, state, tensors, request, workspace, t0, t1, t2; } lease_;
  struct { Field homes, made; } lazy_;
  struct {
    Field direct, dims, extents, key, lead, lender, align, lease_type, nbytes, noted, notes, owner, positions, ready, shelves, sizes, timeline, zero;
  } request_;
  struct { Field epoch, first, lent, nbytes, offset, request, shelf, site, slab, stream, views; } block_;
  struct { Field blocks; } shelf_;
  struct { Field shelves; } sizes_;
  struct { Field elided, hands_over, largest, longer, refits, shelves; } pool_;
  struct { Field address, views; } slab_;
  struct { Field branches, elsewhere, flagged, foreign, held, parent, timeline; } fork_;
  struct { Field before, driver, key; } branch_;
  struct { Field latest; } layout_;
  struct { Field shape, dtype, nbytes; } extent_;
};

extern Parts parts;

// Names as Python strings.
struct Names {
#define WORKSPACE_NAMES(name) \
  name(_check) name(_counted) name(_is_owned) name(_key) name(_keep) name(_leave) name(_release) name(_streams) \
  name(capture_of) name(fence) name(keep) name(keep_held) name(largest) name(stream) \
  name(acquire) name(add_note) name(allocated) name(branches_of) name(closed) \
  name(current_stream) name(declare) name(driver) name(elided) name(empty) name(forked) name(held) \
  name(in_progress) name(joined) name(new_event) name(note) name(open) name(provider) name(record) name(record_use) \
  name(recorded) name(release) name(set_stream) name(tensor) name(timeline) name(unforked) name(wait)
#define WORKSPACE_DECLARE(name) PyObject* name = nullptr;
  WORKSPACE_NAMES(WORKSPACE_DECLARE)
#undef WORKSPACE_DECLARE
  bool make();
};

extern Names names;

// Fills `parts` from Python: classes and functions by name, and (class, attribute) pairs that are inlined.
bool bind(PyObject* given, PyObject* inlined);

// Whether an instance of the timeline is one the C++ knows and nothing unusual stands: no capture, nothing left by
// finalisers, no refusal.
bool steady(const Ref& timeline);

}  // namespace workspace

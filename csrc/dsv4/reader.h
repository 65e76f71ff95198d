// Reads a call's arguments in the schema's order, each with its checks: one line of an op is one argument.
#pragma once
#include <initializer_list>
#include <limits>

#include "call.h"

namespace dsv4 {

// A size an argument must have: a number, or a variable that the first argument to name it binds.
struct Dim {
  Dim(int64_t fixed) : fixed(fixed) {}   // NOLINT: written as a plain number in lists
  Dim(int fixed) : fixed(fixed) {}       // NOLINT
  Dim(int64_t* bound) : bound(bound) {}  // NOLINT

  int64_t fixed = 0;
  int64_t* bound = nullptr;
};

constexpr int64_t kUnbound = -1;

class Reader {
 public:
  explicit Reader(const Call& call) : call_(call) {}

  using Types = std::initializer_list<DType>;
  using Shape = std::initializer_list<Dim>;

  // A contiguous input. An address must be a multiple of `alignment` bytes.
  const Operand& in(const char* name, Types types, Shape shape, int alignment = 16) {
    const Operand& one = next(name, types, shape, alignment);
    contiguous(name, one, one.dims);
    return one;
  }
  // An input that may be None.
  const Operand& maybe(const char* name, Types types, Shape shape, int alignment = 16) {
    const Operand& one = call_.tensor[place_];
    if (one.given) return in(name, types, shape, alignment);
    ++place_;
    return one;
  }
  // An input whose first dim may have any stride: pages of a cache, rows of a block table.
  const Operand& strided(const char* name, Types types, Shape shape, int alignment = 16) {
    const Operand& one = next(name, types, shape, alignment);
    contiguous(name, one, one.dims - 1);
    return one;
  }
  // A cache: pages of bytes [blocks, stride], or plain rows [blocks, block size, width]. `pages.cuh` checks more.
  const Operand& cache(const char* name) {
    names_[place_] = name;
    const Operand& one = call_.tensor[place_++];
    present(name, one);
    if (one.dims < 2) refuse(name, "has too few dims", "pass [blocks, ...]");
    same_device(name, one);
    return one;
  }
  const Operand& cache_or_none(const char* name) {
    if (call_.tensor[place_].given) return cache(name);
    return call_.tensor[place_++];
  }
  // A contiguous out (or scratch); `done` compares its bytes with everybody else's.
  const Operand& out(const char* name, Types types, Shape shape, int alignment = 16) {
    written_ |= 1u << place_;
    return in(name, types, shape, alignment);
  }

  int64_t integer() { return call_.number[number_++].integer; }
  float real() { return static_cast<float>(call_.number[number_++].real); }

  // The last line: no out shares bytes with another tensor of the call.
  void done() const;

  [[noreturn]] void refuse(const std::string& name, const std::string& problem, const std::string& remedy) const {
    throw Refused(name + " of " + call_.op + " " + problem, remedy);
  }
  // What a kernel needs of a number. Texts become strings only when they are told.
  template <class Name, class Problem, class Remedy>
  void require(bool holds, const Name& name, const Problem& problem, const Remedy& remedy) const {
    if (!holds) refuse(name, problem, remedy);
  }
  cudaStream_t stream() const { return call_.stream; }

 private:
  const Operand& next(const char* name, Types types, Shape shape, int alignment);
  void present(const char* name, const Operand& one) const {
    if (!one.given) refuse(name, "is None", "pass a tensor");
  }
  void contiguous(const char* name, const Operand& one, int dims) const;
  void same_device(const char* name, const Operand& one) const {
    if (one.device != call_.tensor[0].device) refuse(name, "is on another device", "pass tensors of one device");
  }

  const Call& call_;
  int place_ = 0;
  int number_ = 0;
  uint32_t written_ = 0;
  const char* names_[kMaxTensors] = {};
};

}  // namespace dsv4

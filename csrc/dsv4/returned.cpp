#include "returned.h"

#include <cstring>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "allocated.h"
#include "arguments.h"
#include "modes.h"

namespace dsv4 {
namespace {

constexpr int kMaxKey = 12;
constexpr int kMaxInputs = 20;
constexpr int kMaxNew = 6;
constexpr size_t kKept = 1024;  // combinations of sizes that are remembered

struct Key {
  int64_t value[kMaxKey];
  int count = 0;

  void add(int64_t one) { value[count++] = one; }
  bool operator==(const Key& other) const {
    return count == other.count && std::memcmp(value, other.value, count * sizeof(int64_t)) == 0;
  }
};

struct HashOfKey {
  size_t operator()(const Key& key) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(key.value), key.count * sizeof(int64_t)});
  }
};

struct Told {
  int tensor, axis;
};

struct Form {
  const Op* op = nullptr;
  int inputs = 0;            // arguments
  int outs = 0, wanted = 0;  // tensors: what is returned, and that with the scratch
  std::vector<Told> told;
  int like = 0;                 // a tensor
  PyObject* untold = nullptr;   // tuple of names
  PyObject* results = nullptr;  // (inputs, dims) -> tuple of tensors
  PyObject* dtype = nullptr;    // its class
  std::unordered_map<Key, std::vector<Operand>, HashOfKey> known;

  ~Form() {
    Py_XDECREF(untold);
    Py_XDECREF(results);
    Py_XDECREF(dtype);
  }
};

constexpr char kForm[] = "dsv4.Form";

// Values of the dims that inputs do not tell, in the order of their names; false when they are others.
bool add_untold(const Form& form, PyObject* dims, Key& key) {
  const Py_ssize_t count = PyTuple_Size(form.untold);
  if (PyDict_Size(dims) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* found = PyDict_GetItemWithError(dims, PyTuple_GetItem(form.untold, i));
    if (!found) return false;
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(found));
    if (type == reinterpret_cast<PyObject*>(&PyLong_Type)) {
      int overflow = 0;
      key.add(PyLong_AsLongLongAndOverflow(found, &overflow));
      if (overflow) return false;
    } else if (type == form.dtype) {
      key.add(reinterpret_cast<int64_t>(found));  // there is one object a dtype, and it stays
    } else {
      return false;
    }
  }
  return true;
}

bool make_key(const Form& form, const Call& call, PyObject* dims, Key& key) {
  const DType like = call.tensor[form.like].dtype;
  if (like == DType::other) return false;
  key.add(static_cast<int64_t>(like));
  for (const Told& told : form.told) {
    const Operand& one = call.tensor[told.tensor];
    if (told.axis >= one.dims) return false;
    key.add(one.size[told.axis]);
  }
  return add_untold(form, dims, key);
}

// Runs the op on tensors of Python's, and remembers their sizes.
PyObject* first_call(Form& form, Call& call, PyObject* made, const Key& key) {
  if (!PyTuple_Check(made) || PyTuple_Size(made) != form.wanted) return Py_NewRef(Py_None);
  for (int i = 0; i < form.wanted; ++i) {
    Operand& one = call.tensor[call.tensors++];
    if (!read_tensor(PyTuple_GetItem(made, i), one) || one.dtype == DType::other) return Py_NewRef(Py_None);
  }
  switch (run_now(*form.op, call)) {
    case Ran::launched:
      if (form.known.size() >= kKept) form.known.clear();
      form.known[key] = {call.tensor + call.tensors - form.wanted, call.tensor + call.tensors};
      return form.outs == 1 ? Py_NewRef(PyTuple_GetItem(made, 0)) : PyTuple_GetSlice(made, 0, form.outs);
    case Ran::not_taken:
      return Py_NewRef(Py_None);
    default:
      return nullptr;
  }
}

PyObject* wrapped(Allocated* made, int count) {
  if (count == 1) return made->wrapped();
  PyObject* found = PyTuple_New(count);
  for (int i = 0; found && i < count; ++i) {
    PyObject* one = made[i].wrapped();
    if (!one)
      Py_CLEAR(found);
    else
      PyTuple_SetItem(found, i, one);
  }
  return found;
}

PyObject* called(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto* form = static_cast<Form*>(PyCapsule_GetPointer(self, kForm));
  if (!form) return nullptr;
  if (count != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "pass the inputs in a tuple and the dims in a dict");
    return nullptr;
  }
  PyObject* inputs[kMaxInputs];
  if (any_mode() || PyTuple_Size(args[0]) != form->inputs) return Py_NewRef(Py_None);
  for (int i = 0; i < form->inputs; ++i) inputs[i] = PyTuple_GetItem(args[0], i);
  Call call;  // read_arguments fills what the op reads
  if (!read_arguments(form->op->signature, inputs, form->inputs, call)) return Py_NewRef(Py_None);
  Key key;
  const bool sound = !PyErr_Occurred() && make_key(*form, call, args[1], key);
  if (PyErr_Occurred()) return nullptr;  // a number was none
  if (!sound) return Py_NewRef(Py_None);
  const auto known = form->known.find(key);
  if (known == form->known.end()) {
    PyObject* made = PyObject_CallFunctionObjArgs(form->results, args[0], args[1], nullptr);
    PyObject* found = made ? first_call(*form, call, made, key) : nullptr;
    Py_XDECREF(made);
    return found;
  }
  Operand* wanted = call.tensor + call.tensors;
  for (const Operand& one : known->second) call.tensor[call.tensors++] = one;
  Allocated made[kMaxNew];
  for (int i = 0; i < form->wanted; ++i) {
    wanted[i].device = call.tensor[form->like].device;
    if (!made[i].allocate(wanted[i])) return Py_NewRef(Py_None);  // Python's allocation says why
  }
  switch (run_now(*form->op, call)) {
    case Ran::launched:
      return wrapped(made, form->outs);
    case Ran::not_taken:
      return Py_NewRef(Py_None);
    default:
      return nullptr;
  }
}

PyMethodDef call_method = {"returning", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&called)), METH_FASTCALL,
                           nullptr};

void free_form(PyObject* capsule) { delete static_cast<Form*>(PyCapsule_GetPointer(capsule, kForm)); }

// How many of the first arguments are tensors.
int tensors_before(const char* signature, int place) {
  int count = 0;
  for (int i = 0; i < place; ++i) count += signature[i] == 't' || signature[i] == 'o';
  return count;
}

bool read_told(PyObject* pairs, Form& form) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(pairs); ++i) {
    int place, axis;
    if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, i), "ii", &place, &axis)) return false;
    form.told.push_back({tensors_before(form.op->signature, place), axis});
  }
  return true;
}

}  // namespace

PyObject* returning(PyObject*, PyObject* args) {
  const char* name;
  PyObject *told, *untold, *results, *dtype;
  int inputs, like, outs;
  if (!PyArg_ParseTuple(args, "siO!iO!iOO", &name, &inputs, &PyTuple_Type, &told, &like, &PyTuple_Type, &untold, &outs,
                        &results, &dtype)) {
    return nullptr;
  }
  if (!bind_allocated() || !bind_modes()) return Py_NewRef(Py_None);
  auto form = std::make_unique<Form>();
  for (const Op& op : kOps) {
    if (std::strcmp(op.name, name) == 0) form->op = &op;
  }
  if (!form->op) return PyErr_Format(PyExc_KeyError, "%s has no kernel", name);
  form->inputs = inputs;
  form->wanted = static_cast<int>(std::strlen(form->op->signature)) - inputs;
  form->outs = outs;
  form->like = tensors_before(form->op->signature, like);
  if (!read_told(told, *form)) return nullptr;
  if (inputs > kMaxInputs || form->wanted > kMaxNew || 1 + form->told.size() + PyTuple_Size(untold) > kMaxKey) {
    return PyErr_Format(PyExc_ValueError, "%s has too many arguments or dims", name);
  }
  form->untold = Py_NewRef(untold);
  form->results = Py_NewRef(results);
  form->dtype = Py_NewRef(dtype);
  PyObject* capsule = PyCapsule_New(form.get(), kForm, &free_form);
  if (!capsule) return nullptr;
  form.release();
  PyObject* function = PyCFunction_NewEx(&call_method, capsule, nullptr);
  Py_DECREF(capsule);
  return function;
}

}  // namespace dsv4

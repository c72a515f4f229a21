// Calls from Python. Their values are read from its objects by Python's stable ABI, which is declared here: one build serves
// every version from 3.11 on, and Python's headers need not be there. All of it runs with the GIL.
#pragma once
#include "external.h"
#include "programs.h"

struct _object;
using PyObject = _object;

extern "C" {
struct PyMethodDef { const char* name; void* function; int flags; const char* doc; };
extern PyObject _Py_NoneStruct, _Py_TrueStruct, PyBool_Type, PyFloat_Type, PyLong_Type;
void Py_DecRef(PyObject*);
PyObject* Py_NewRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
int PyType_IsSubtype(PyObject*, PyObject*);
PyObject* PyBool_FromLong(long);
long long PyLong_AsLongLong(PyObject*);
long long PyLong_AsLongLongAndOverflow(PyObject*, int*);
void* PyLong_AsVoidPtr(PyObject*);
double PyFloat_AsDouble(PyObject*);
PyObject* PySequence_Tuple(PyObject*);
ssize_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, ssize_t);
char* PyBytes_AsString(PyObject*);
PyObject* PyErr_Occurred();
void PyErr_SetString(PyObject* type, const char*);
extern PyObject* PyExc_TypeError;
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
}

namespace kcap {

constexpr int kNoArguments = 0x0004, kOneArgument = 0x0008, kFastCall = 0x0080;  // METH_NOARGS, METH_O, METH_FASTCALL

struct Release { void operator()(PyObject* object) const { Py_DecRef(object); } };
using Owned = std::unique_ptr<PyObject, Release>;

// Reads the values of a call. `self` holds Python's Tensor, the name of the attribute with a tensor's address, and the
// `Packer`, which takes over the calls that have any value but numbers, tensors and None.
class ValueReader {
 public:
  explicit ValueReader(PyObject* self) : tensor_(PyTuple_GetItem(self, 0)), address_(PyTuple_GetItem(self, 1)), packer_(PyTuple_GetItem(self, 2)) {}

  // Nothing where Python raised.
  std::optional<std::vector<IValue>> read(PyObject* sequence) const {
    const Owned values(PySequence_Tuple(sequence));  // which no Python code that runs here can change
    if (!values) return std::nullopt;
    const ssize_t count = PyTuple_Size(values.get());
    std::vector<IValue> inputs;
    inputs.reserve(static_cast<size_t>(count));
    for (ssize_t i = 0; i < count; i++) {
      if (append(PyTuple_GetItem(values.get(), i), inputs)) continue;
      if (PyErr_Occurred()) return std::nullopt;
      inputs.clear();
      return packed(values.get(), count);
    }
    return inputs;
  }

 private:
  // False where Python raised, or the value is for the Packer.
  bool append(PyObject* value, std::vector<IValue>& inputs) const {
    if (value == &_Py_NoneStruct) return inputs.emplace_back(), true;
    const Owned owned(PyObject_Type(value));
    const PyObject* type = owned.get();
    if (type == &PyLong_Type) {
      int overflow = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (!overflow) inputs.emplace_back(number);
      return !overflow;
    }
    if (PyType_IsSubtype(owned.get(), tensor_)) {
      const Owned number(PyObject_GetAttr(value, address_));
      void* address = number ? PyLong_AsVoidPtr(number.get()) : nullptr;
      if (address) inputs.emplace_back(tensor_at(address));
      return address != nullptr;
    }
    if (type == &PyFloat_Type) return inputs.emplace_back(PyFloat_AsDouble(value)), true;
    if (type == &PyBool_Type) return inputs.emplace_back(value == &_Py_TrueStruct), true;
    return false;
  }

  std::optional<std::vector<IValue>> packed(PyObject* values, ssize_t count) const {
    const Owned pair(PyObject_CallFunctionObjArgs(packer_, values, nullptr));
    if (!pair) return std::nullopt;
    const auto bytes = [&](int part) { return PyBytes_AsString(PyTuple_GetItem(pair.get(), part)); };
    return unpacked(static_cast<int>(count), reinterpret_cast<const uint8_t*>(bytes(0)), reinterpret_cast<const int64_t*>(bytes(1)));
  }

  PyObject *tensor_, *address_, *packer_;
};

// `call(operator, launch, values, enter, detail)`, as kcap_call.
inline PyObject* call_from_python(PyObject* self, PyObject* const* arguments, ssize_t count) {
  if (count != 5) return PyErr_SetString(PyExc_TypeError, "call takes operator, launch, values, enter, detail"), nullptr;
  const int64_t op = PyLong_AsLongLong(arguments[0]), launch = PyLong_AsLongLong(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  const bool enter = arguments[3] == &_Py_TrueStruct, detail = arguments[4] == &_Py_TrueStruct;
  bool recorded = false;
  if (may_record(detail)) {
    std::optional<std::vector<IValue>> inputs;
    guarded([&] { inputs = ValueReader(self).read(arguments[2]); });
    recorded = inputs && record_call(op, launch, *inputs, enter, detail);
  }
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(recorded);
}

inline PyObject* may_record_from_python(PyObject*, PyObject* detail) { return PyBool_FromLong(may_record(detail == &_Py_TrueStruct)); }

inline PyObject* leave_from_python(PyObject*, PyObject*) { return leave(), Py_NewRef(&_Py_NoneStruct); }

inline PyObject* launching_from_python(PyObject*, PyObject* graph) {
  const int64_t number = PyLong_AsLongLong(graph);
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(launching(number));
}

// What Python calls most, by name; nullptr: not one of them. `self`: what ValueReader holds, for `call`.
inline PyObject* function_for_python(std::string_view name, PyObject* self) {
  static PyMethodDef methods[] = {
      {"call", reinterpret_cast<void*>(call_from_python), kFastCall, nullptr},
      {"may_record", reinterpret_cast<void*>(may_record_from_python), kOneArgument, nullptr},
      {"leave", reinterpret_cast<void*>(leave_from_python), kNoArguments, nullptr},
      {"graph_launching", reinterpret_cast<void*>(launching_from_python), kOneArgument, nullptr},
  };
  for (PyMethodDef& method : methods)
    if (name == method.name) return PyCFunction_NewEx(&method, self, nullptr);
  return PyErr_SetString(PyExc_TypeError, "the recorder has no such function"), nullptr;
}

}  // namespace kcap

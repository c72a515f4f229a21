// Calls from Python. Their values are taken out of its objects by Python's stable ABI, which is declared here: one build
// serves every version of Python, and its headers need not be there.
#pragma once
#include "external.h"

struct _object;
using PyObject = _object;

extern "C" {
struct PyMethodDef { const char* name; void* function; int flags; const char* doc; };
extern PyObject _Py_NoneStruct, PyBool_Type, PyFloat_Type, PyList_Type, PyLong_Type, PyTuple_Type;
void Py_DecRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
int PyObject_IsTrue(PyObject*);
int PyType_IsSubtype(PyObject*, PyObject*);
PyObject* PyBool_FromLong(long);
long long PyLong_AsLongLong(PyObject*);
long long PyLong_AsLongLongAndOverflow(PyObject*, int*);
void* PyLong_AsVoidPtr(PyObject*);
double PyFloat_AsDouble(PyObject*);
ssize_t PyList_Size(PyObject*), PyTuple_Size(PyObject*), PySequence_Size(PyObject*);
PyObject *PyList_GetItem(PyObject*, ssize_t), *PyTuple_GetItem(PyObject*, ssize_t);
char* PyBytes_AsString(PyObject*);
PyObject* PyErr_Occurred();
void PyErr_SetString(PyObject* type, const char*);
extern PyObject* PyExc_TypeError;
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
}

namespace kcap {

constexpr int kFastCall = 0x0080;  // METH_FASTCALL

struct Release { void operator()(PyObject* object) const { Py_DecRef(object); } };
using Owned = std::unique_ptr<PyObject, Release>;

// What takes values: Python's Tensor, the name of the attribute that holds a tensor's address, and a `Packer` for what
// is no number, no tensor and not None.
class Values {
 public:
  explicit Values(PyObject* self) : tensor_(PyTuple_GetItem(self, 0)), address_(PyTuple_GetItem(self, 1)), packer_(PyTuple_GetItem(self, 2)) {}

  // Those of a sequence; nothing where Python raised.
  std::optional<std::vector<IValue>> taken(PyObject* values) const {
    const Owned type(PyObject_Type(values));
    const bool is_tuple = type.get() == &PyTuple_Type;
    std::vector<IValue> inputs;
    if (!is_tuple && type.get() != &PyList_Type) return packed(values);
    const ssize_t count = is_tuple ? PyTuple_Size(values) : PyList_Size(values);
    inputs.reserve(static_cast<size_t>(count));
    for (ssize_t i = 0; i < count; i++)
      if (!take(is_tuple ? PyTuple_GetItem(values, i) : PyList_GetItem(values, i), inputs)) return PyErr_Occurred() ? std::nullopt : packed(values);
    return inputs;
  }

 private:
  bool take(PyObject* value, std::vector<IValue>& inputs) const {
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
      const Owned address(PyObject_GetAttr(value, address_));
      if (!address) return false;
      inputs.emplace_back(tensor_at(PyLong_AsVoidPtr(address.get())));
      return true;
    }
    if (type == &PyFloat_Type) return inputs.emplace_back(PyFloat_AsDouble(value)), true;
    if (type == &PyBool_Type) return inputs.emplace_back(PyObject_IsTrue(value) != 0), true;
    return false;
  }

  std::optional<std::vector<IValue>> packed(PyObject* values) const {
    const Owned pair(PyObject_CallFunctionObjArgs(packer_, values, nullptr));
    if (!pair) return std::nullopt;
    const auto bytes = [&](int part) { return PyBytes_AsString(PyTuple_GetItem(pair.get(), part)); };
    return unpacked(static_cast<int>(PySequence_Size(values)), reinterpret_cast<const uint8_t*>(bytes(0)), reinterpret_cast<const int64_t*>(bytes(1)));
  }

  PyObject *tensor_, *address_, *packer_;
};

// `call(operator, launch, values, enter, detail)`, as kcap_call.
inline PyObject* call_from_python(PyObject* self, PyObject* const* arguments, ssize_t count) {
  if (count != 5) return PyErr_SetString(PyExc_TypeError, "call takes operator, launch, values, enter, detail"), nullptr;
  const bool enter = PyObject_IsTrue(arguments[3]), detail = PyObject_IsTrue(arguments[4]);
  int recorded = 0;
  if (may_record(detail)) {
    std::optional<std::vector<IValue>> inputs;
    if (guarded([&] { inputs = Values(self).taken(arguments[2]); }) == 0 && inputs)
      recorded = record_call(PyLong_AsLongLong(arguments[0]), PyLong_AsLongLong(arguments[1]), *inputs, enter, detail);
  }
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(recorded);
}

}  // namespace kcap

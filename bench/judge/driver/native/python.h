// The driver's dealings with Python: references, the call, errors.
#pragma once

#include <Python.h>

#include "returned.h"

namespace kcap {

struct Owned {
  PyObject* object;
  explicit Owned(PyObject* object = nullptr) : object(object) {}
  Owned(Owned&& other) noexcept : object(other.object) { other.object = nullptr; }
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Owned() { Py_XDECREF(object); }
};

// While it lives the collector of garbage rests.
struct NoCollection {
  int was = PyGC_Disable();
  ~NoCollection() { if (was) PyGC_Enable(); }
};

inline std::string text_of(PyObject* object) {
  Owned text(object ? PyObject_Str(object) : nullptr);
  const char* found = text.object ? PyUnicode_AsUTF8(text.object) : nullptr;
  if (!found) PyErr_Clear();
  return found ? found : "";
}

// The exception that is set, as `Kind: message`; its traceback goes to standard error.
inline std::string exception() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  std::string name = type ? reinterpret_cast<PyTypeObject*>(type)->tp_name : "error";
  std::string message = text_of(value);
  if (PyErr_GivenExceptionMatches(type, PyExc_SystemExit)) {
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
  } else {
    PyErr_Restore(type, value, trace);
    PyErr_PrintEx(0);
  }
  return message.empty() ? name : name + ": " + message;
}

}  // namespace kcap

// A Workload as the judge describes it: its inputs, its outputs, and where they lie.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <unordered_map>

#include "message.h"

namespace kcap {

enum Kind : uint32_t { POOLED, FIXED, INTEGER, REAL, BOOLEAN, NOTHING };
enum Operation : uint32_t { OPEN = 1, PREPARE = 2, RUN = 3, DELIVER = 4 };
enum Flag : uint32_t { DESTINATION = 1, GRAPHS = 2 };

inline at::ScalarType dtype_of(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> known = {
      {"float64", at::kDouble},       {"float32", at::kFloat},
      {"float16", at::kHalf},         {"bfloat16", at::kBFloat16},
      {"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2},
      {"float4_e2m1fn_x2", at::ScalarType::Float4_e2m1fn_x2},
      {"int64", at::kLong},           {"int32", at::kInt},
      {"int16", at::kShort},          {"int8", at::kChar},
      {"uint8", at::kByte},           {"bool", at::kBool}};
  auto found = known.find(name);
  if (found == known.end()) throw std::runtime_error("the driver knows no dtype " + name);
  return found->second;
}

struct Tensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  size_t bytes = 0;
  size_t item = 0;

  void read(Reader& from) {
    name = from.text();
    dtype = dtype_of(from.text());
    item = c10::elementSize(dtype);
    bytes = item;
    sizes.resize(from.u32());
    for (auto& size : sizes) bytes *= size_t(size = from.take<int64_t>());
  }
};

struct Input : Tensor {
  Kind kind;
  uint64_t offset = 0;    // of its content in the pool
  uint64_t slack = 0;     // POOLED: elements that its content has more than the input
  uint64_t stride = 0;    // FIXED: bytes from one variant of its content to the next
  bool written = false;   // it need not be what it was
  int64_t integer = 0;
  double real = 0;

  bool is_tensor() const { return kind == POOLED || kind == FIXED; }

  // Where in the pool the content of invocation `i` begins, if it lies there in one piece.
  uint64_t begin(uint64_t seed, uint64_t i, uint64_t j, uint64_t variant) const {
    return kind == POOLED ? offset + mixed(seed, i, j) % (slack + 1) * item : offset + variant * stride;
  }

  PyObject* scalar() const {
    switch (kind) {
      case INTEGER: return PyLong_FromLongLong(integer);
      case REAL: return PyFloat_FromDouble(real);
      case BOOLEAN: return PyBool_FromLong(integer != 0);
      default: Py_RETURN_NONE;
    }
  }

  void read(Reader& from) {
    kind = Kind(from.u32());
    integer = from.take<int64_t>();
    real = from.take<double>();
    if (!is_tensor()) return;
    Tensor::read(from);
    offset = from.u64(), slack = from.u64(), stride = from.u64(), written = from.u32();
  }
};

struct Output : Tensor {
  uint64_t offset = 0;  // in a slot
};

struct Workload {
  bool destination = false;
  bool graphs = false;  // on a GPU: batches are captured
  uint32_t variants = 1;
  uint32_t sets = 1;  // of inputs: as many as there are invocations in a run at most
  uint64_t pool_bytes = 0, slot_bytes = 0;
  uint64_t stride = 0;           // bytes from one set to the next
  std::vector<uint64_t> places;  // in a set: of each input, and in destination passing style of each output
  std::vector<Input> inputs;
  std::vector<Output> outputs;

  void read(Reader from) {
    from.u32();
    uint32_t flags = from.u32();
    destination = flags & DESTINATION, graphs = flags & GRAPHS;
    variants = from.u32(), sets = from.u32();
    pool_bytes = from.u64(), slot_bytes = from.u64(), stride = from.u64();
    inputs.resize(from.u32());
    for (auto& input : inputs) input.read(from);
    outputs.resize(from.u32());
    for (auto& output : outputs) output.Tensor::read(from), output.offset = from.u64();
    places.resize(from.u32());
    for (auto& place : places) place = from.u64();
  }

  // One invocation in four has the index inputs of another variant, if there is one.
  uint64_t variant(uint64_t seed, uint64_t i) const {
    if (variants < 2 || mixed(seed, i, 4094) % 4) return 0;
    return 1 + mixed(seed, i, 4095) % (variants - 1);
  }
};

struct Run {
  uint32_t first = 0;  // its number among those of `seed`
  uint32_t count = 0;
  uint32_t upcast = 0;  // 0, or the bits of the dtype that floating inputs are given in
  uint64_t seed = 0;    // on a GPU: what its inputs are filled by

  Run() = default;
  Run(Reader from, const Workload& workload) {
    from.u32();
    first = from.u32(), count = from.u32(), upcast = from.u32(), seed = from.u64();
    if (count > workload.sets) throw std::runtime_error("more invocations than sets of inputs");
  }
};

}  // namespace kcap

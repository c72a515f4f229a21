// Tensors that say that they are on a GPU, in memory that the driver makes for torch's pools of outputs.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <list>

using Take = void* (*)(size_t, int, void*);
using GiveBack = void (*)(void*, size_t, int, void*);

namespace {
struct Segment { char* base; size_t size, used; int tensors; };

Take take_memory = nullptr;
GiveBack give_back_memory = nullptr;
std::list<Segment> segments;

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  size_t size = c10::elementSize(dtype);
  for (auto each : sizes) size *= size_t(each);
  size = (size + 511) / 512 * 512;
  if (segments.empty() || segments.back().used + size > segments.back().size) {
    size_t whole = std::max(size, size_t(1) << 20);
    auto* base = static_cast<char*>(take_memory(whole, 0, nullptr));
    if (!base) throw std::runtime_error("CUDA out of memory");
    segments.push_back({base, whole, 0, 0});
  }
  auto* segment = &segments.back();
  auto* place = segment->base + segment->used;
  segment->used += size, ++segment->tensors;
  at::Device gpu(at::kCUDA, 0);
  auto options = at::TensorOptions().dtype(dtype).device(gpu);
  auto deleter = [segment](void*) { --segment->tensors; };
  return at::for_blob(place, sizes).options(options).target_device(gpu).deleter(deleter).make_tensor();
}

at::Tensor cloned(const at::Tensor& from, std::optional<at::MemoryFormat>) {
  auto made = empty(from.sizes(), from.scalar_type());
  std::memcpy(made.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  return made;
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("clone", cloned); }

extern "C" void use(Take take, GiveBack give_back) { take_memory = take, give_back_memory = give_back; }

// Where no tensor lies any more.
extern "C" void give_back() {
  segments.remove_if([](const Segment& one) {
    if (!one.tensors) give_back_memory(one.base, one.size, 0, nullptr);
    return !one.tensors;
  });
}

extern "C" PyObject* made(long m, long n) try {
  return THPVariable_Wrap(empty({m, n}, at::kFloat));
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

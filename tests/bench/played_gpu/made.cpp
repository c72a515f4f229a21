// Tensors that say that they are on a GPU, in memory that the driver makes for torch's pool of outputs.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

using Take = void* (*)(size_t, int, void*);

namespace {
Take take_memory = nullptr;

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  static char* free_from = nullptr;
  static size_t left = 0;
  size_t size = c10::elementSize(dtype);
  for (auto each : sizes) size *= size_t(each);
  size = (size + 511) / 512 * 512;
  if (size > left) {
    left = std::max(size, size_t(1) << 20);
    free_from = static_cast<char*>(take_memory(left, 0, nullptr));
  }
  at::Device gpu(at::kCUDA, 0);
  auto options = at::TensorOptions().dtype(dtype).device(gpu);
  auto tensor = at::for_blob(free_from, sizes).options(options).target_device(gpu).make_tensor();
  free_from += size, left -= size;
  return tensor;
}

at::Tensor cloned(const at::Tensor& from, std::optional<at::MemoryFormat>) {
  auto made = empty(from.sizes(), from.scalar_type());
  std::memcpy(made.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  return made;
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("clone", cloned); }

extern "C" void use(Take take) { take_memory = take; }

extern "C" PyObject* made(long m, long n) { return THPVariable_Wrap(empty({m, n}, at::kFloat)); }

// Tensors that say that they are on a GPU, in host memory.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdlib>

extern "C" PyObject* made(long m, long n) {
  at::Device gpu(at::kCUDA, 0);
  auto tensor = at::for_blob(std::malloc(size_t(m * n) * sizeof(float)), {m, n})
                    .deleter([](void* memory) { std::free(memory); })
                    .options(at::TensorOptions().dtype(at::kFloat).device(gpu))
                    .target_device(gpu)
                    .make_tensor();
  return THPVariable_Wrap(tensor);
}

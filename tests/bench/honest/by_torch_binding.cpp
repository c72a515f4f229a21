// definition: relu
// devices: cpu
// patient: the compiler takes as long as it takes
// does: C++ through torch's binding.
// binding: torch
// entry: relu
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>  // half of what torch/extension.h takes to compile

at::Tensor relu(at::Tensor x) {
  auto out = at::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] > 0 ? from[i] : 0;
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("relu", &relu); }

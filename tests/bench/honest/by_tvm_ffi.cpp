// definition: relu
// devices: cpu
// does: C++ through tvm-ffi, which writes into the output that it is given.
// binding: tvm-ffi
// entry: relu
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

void relu(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {
  const float* from = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] > 0 ? from[i] : 0;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(relu, relu);

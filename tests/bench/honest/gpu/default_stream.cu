// definition: relu
// does: CUDA C++ that launches on the default stream, as much code does: what is captured lacks it.
// binding: tvm-ffi
// entry: relu
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

__global__ void kernel(const float* x, float* out, long n) {
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long)blockDim.x)
    out[i] = x[i] > 0 ? x[i] : 0;
}

void relu(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {
  kernel<<<512, 256>>>(static_cast<const float*>(x.data_ptr()), static_cast<float*>(out.data_ptr()), x.numel());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(relu, relu);

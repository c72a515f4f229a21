// definition: relu
// does: CUDA C++ through tvm-ffi, on the stream that it is told.
// binding: tvm-ffi
// entry: relu
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

__global__ void kernel(const float* x, float* out, long n) {
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long)blockDim.x)
    out[i] = x[i] > 0 ? x[i] : 0;
}

void relu(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {
  DLDevice device = x.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  kernel<<<512, 256, 0, stream>>>(static_cast<const float*>(x.data_ptr()), static_cast<float*>(out.data_ptr()), x.numel());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(relu, relu);

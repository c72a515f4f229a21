"""CUDA Solutions built: the toolkit that is chosen, and what is said where there is none, or no GPU."""

from __future__ import annotations

import os

import pytest
import torch
from solution_files import solution

from kcap.bench.build import BuildFailed, build, compilers, environment

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


@pytest.fixture
def own(tmp_path, monkeypatch):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def reason(of, folder):
    with pytest.raises(BuildFailed) as caught:
        build(of, folder)
    return caught.value.reason


@pytest.fixture
def hopper(monkeypatch):
    """A torch that says it has a Hopper GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    for name in ("CPLUS_INCLUDE_PATH", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "TVM_FFI_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def toolkit_in(folder, *files):
    for name in ("bin/nvcc", *files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    return folder


@pytest.mark.parametrize("binding", ["torch", "tvm-ffi"])
@pytest.mark.parametrize("language", ["cuda", "cpp"])
def test_cuda_sources_without_cuda_fail(own, monkeypatch, binding, language):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    of = solution({"scale.cu": "int f();\n"}, "scale.cu::scale", language, binding=binding)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA" in reason(of, own)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert reason(of, own) == "CUDA sources, but there is no CUDA GPU here"


def test_missing_nvcc_is_named(own, hopper):
    hopper.setattr(compilers, "_cuda_homes", lambda: iter([own]))
    of = solution({"scale.cu": "int f();\n"}, "scale.cu::scale", "cuda")
    assert reason(of, own).startswith("no nvcc here: install the CUDA toolkit")


def test_hopper_is_compiled_for_with_its_own_instructions(hopper, tmp_path):
    hopper.setenv("CUDA_HOME", str(toolkit_in(tmp_path, "include/cuda_runtime.h")))
    compilers.prepare_toolkit()
    assert os.environ["TVM_FFI_CUDA_ARCH_LIST"] == os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert os.environ["CUDA_HOME"] == str(tmp_path)


def test_users_architectures_stand(hopper, tmp_path):
    hopper.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    hopper.setenv("CUDA_HOME", str(toolkit_in(tmp_path, "include/cuda_runtime.h")))
    compilers.prepare_toolkit()
    assert (os.environ["TORCH_CUDA_ARCH_LIST"], os.environ["TVM_FFI_CUDA_ARCH_LIST"]) == ("8.0", "9.0a")


def test_whole_toolkit_is_preferred_to_a_wrapper_on_the_path(hopper, tmp_path):
    wrapper, whole = toolkit_in(tmp_path / "a"), toolkit_in(tmp_path / "b", "include/cuda_runtime.h")
    hopper.setattr(compilers, "_cuda_homes", lambda: iter([wrapper, whole]))
    assert compilers.cuda_home() == whole


def test_headers_that_the_toolkit_lacks_are_those_of_torchs_packages(hopper, tmp_path):
    (tmp_path / "cu13" / "include").mkdir(parents=True)
    hopper.setenv("CUDA_HOME", str(toolkit_in(tmp_path, "include/cuda_runtime.h")))
    hopper.setenv("CPLUS_INCLUDE_PATH", "/opt/mine")
    hopper.setattr(compilers, "nvidia_packages", lambda torch_file: tmp_path)
    compilers.prepare_toolkit()
    assert os.environ["CPLUS_INCLUDE_PATH"] == f"/opt/mine:{tmp_path}/cu13/include"


CUDA = """
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
__global__ void kernel(const float* x, float eps, float* y, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = x[i] * eps;
}
void scale(tvm::ffi::TensorView x, double eps, tvm::ffi::TensorView y) {
  auto device = x.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  kernel<<<(x.numel() + 255) / 256, 256, 0, stream>>>(
      static_cast<float*>(x.data_ptr()), eps, static_cast<float*>(y.data_ptr()), x.numel());
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale);
"""
CUDA_PYBIND = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
__global__ void kernel(const float* x, float eps, float* y, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = x[i] * eps;
}
void scale(torch::Tensor x, double eps, torch::Tensor y) {
  kernel<<<(x.numel() + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), eps, y.data_ptr<float>(), x.numel());
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scale", &scale); }
"""


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize(("binding", "text"), [("tvm-ffi", CUDA), ("torch", CUDA_PYBIND)])
def test_cuda_kernel_is_compiled_and_called(own, binding, text):
    run = build(solution({"scale.cu": text}, "scale.cu::scale", "cuda", binding=binding), own / "build")
    x = torch.arange(6.0, device="cuda")
    y = torch.zeros_like(x)
    run(x, 2.0, y)
    torch.testing.assert_close(y, x * 2)

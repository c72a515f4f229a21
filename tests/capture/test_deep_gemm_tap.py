"""DeepGEMM's tap, on a stand-in for the package with a Python module in the place of its extension."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_calls import Heard, imported, write_package

from kcap.capture.taps.libraries import deep_gemm
from kcap.capture.taps.libraries.library import LibraryTap

X = torch.ones(2)
INIT = """
import torch as _torch
from {name}.kernels import fp8_gemm_nt, m_grouped_fp8_gemm_nt_masked, set_num_sms, get_num_sms, _private
from {name}.kernels import transform_sf_into_required_layout, get_paged_mqa_logits_metadata
from {name}.utils import *
from _operator import length_hint as native_gemm
from _operator import truth as set_native
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
"""
KERNELS = """
def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False): return d
def m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m): return d
def transform_sf_into_required_layout(sf, mn, k): return sf
def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms): return context_lens
def set_num_sms(count): pass
def get_num_sms(): return 132
def _private(x): return x
"""
UTILS = "def per_token_cast_to_fp8(x): return x\ndef ceil_div(x, y): return -(-x // y)\n"
VLLM = """
_fp8_gemm_nt_impl = None

def lazy_init():
    global _fp8_gemm_nt_impl
    import deep_gemm
    _fp8_gemm_nt_impl = deep_gemm.fp8_gemm_nt
"""


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        files = {"__init__.py": INIT.format(name=name), "kernels.py": KERNELS, "utils/__init__.py": UTILS}
        write_package(tmp_path, name, files)
    for name in ("vllm", "vllm.third_party"):
        write_package(tmp_path, name, {})
    write_package(tmp_path, "kcapuser", {"__init__.py": VLLM})
    monkeypatch.syspath_prepend(str(tmp_path))
    yield from imported(sys.modules, "deep_gemm", "vllm", "kcapuser")


@pytest.fixture
def install(heard: Heard) -> Iterator[Callable[[], object]]:
    """Installs the tap; undone afterwards, so that it does not wait for the next test's package."""
    taps: list[LibraryTap] = []
    yield lambda: taps.append(deep_gemm.install(heard))
    for tap in taps:
        tap.undo()


def load(name: str = "deep_gemm") -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["deep_gemm", "vllm.third_party.deep_gemm"])
def test_a_kernel_is_recorded_under_one_name_wherever_the_package_lives(
    heard: Heard, install: Callable[[], object], name: str
) -> None:
    install()
    module = load(name)
    assert module.fp8_gemm_nt((X, X), (X, X), X) is X
    module.fp8_m_grouped_gemm_nt_masked((X, X), (X, X), X, X, 2)
    assert heard.operators == ["deep_gemm::fp8_gemm_nt", "deep_gemm::m_grouped_fp8_gemm_nt_masked"]
    assert list(heard.calls[0][1]) == ["a", "b", "d", "c", "recipe", "compiled_dims", "disable_ue8m0_cast"]
    assert heard.flags == [(True, False)] * 2


def test_settings_and_torch_helpers_are_left_out(heard: Heard, install: Callable[[], object]) -> None:
    install()
    module = load()
    module.set_num_sms(X)
    module._private(X)
    module.set_native([X])
    assert (module.get_num_sms(), module.ceil_div(3, 2)) == (132, 2)
    module.per_token_cast_to_fp8(X)
    assert heard.calls == []


def test_layout_work_and_metadata_kernels_count(heard: Heard, install: Callable[[], object]) -> None:
    install()
    module = load()
    module.transform_sf_into_required_layout(X, 1, 2)
    module.get_paged_mqa_logits_metadata(X, 64, 132)
    assert heard.operators == [
        "deep_gemm::transform_sf_into_required_layout",
        "deep_gemm::get_paged_mqa_logits_metadata",
    ]


def test_a_function_of_the_extension_is_recorded(heard: Heard, install: Callable[[], object]) -> None:
    install()
    assert load().native_gemm([X]) == 1
    assert heard.operators == ["deep_gemm::length_hint"]


@pytest.mark.parametrize("installed_first", [True, False])
def test_the_handles_that_an_engine_resolves_lazily_are_recorded(
    heard: Heard, install: Callable[[], object], installed_first: bool
) -> None:
    user = load("kcapuser")
    if installed_first:
        install()
    user.lazy_init()
    if not installed_first:
        install()
    user._fp8_gemm_nt_impl(X, X, X)
    assert heard.operators == ["deep_gemm::fp8_gemm_nt"]

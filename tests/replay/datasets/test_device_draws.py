"""What is drawn on a GPU is what the CPU's code draws from the same words, whole or in parts."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from pathlib import Path

import pytest
import torch
from definitions import PAGED, definition, tensor, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.errors import KcapError
from kcap.replay.datasets import invocations
from kcap.replay.datasets.invocations import OF_BOOLS, InvocationDraws

SOURCE = Path(invocations.__file__).with_name("device_draws.py")
FLOATS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # and what a unit in the last place is
SHORTEST = invocations.SHORTEST_WITH_OUTLIER
SHAPES = st.sampled_from([(1, 7, 1), (3, 33, 1), (5, 100, 1), (7, 512, 16), (2, 2048, 16)])
STREAMS = st.integers(0, (1 << 64) - 1)
NUMBERS = st.one_of(st.integers(0, 100), st.integers(0, 1 << 40))
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def device_draws(device):
    """A copy of the module of its own: on the CPU Triton's interpreter runs its kernels."""
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location(f"draws_on_{device}", SOURCE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", str(int(device == "cpu")))
        spec.loader.exec_module(module)
    return module


def drawn_on_the_cpu(dtype, count, shape, pool, spread, stream, first):
    place = torch.zeros(count, shape[0] * shape[1], dtype=dtype)
    invocations._library().kcap_fill_floats(
        ctypes.c_void_p(place.data_ptr()),
        ctypes.c_uint64(place.stride(0) * place.itemsize),
        ctypes.c_uint64(first),
        ctypes.c_uint64(count),
        place.itemsize * 8,
        dtype == torch.bfloat16,
        struct.pack("=QQQ", pool.data_ptr(), *pool.shape),
        struct.pack("=fff", *spread),
        struct.pack("=QQQQ", *shape, SHORTEST),
        ctypes.c_uint64(stream),
    )
    return place


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([*FLOATS]), SHAPES, STREAMS, NUMBERS)
def test_floats_are_those_of_the_cpu(device_draws, device, dtype, shape, stream, first):
    pool, spread = torch.randn(64, 128 // dtype.itemsize), (1.0, 1.0, 0.7)
    want = drawn_on_the_cpu(dtype, 4, shape, pool, spread, stream, first)
    memory = torch.zeros(4, shape[0] * shape[1] + 5, dtype=dtype, device=device)  # sets of inputs lie apart
    place = memory[:, : shape[0] * shape[1]]
    device_draws.fill_floats(place, pool.to(device), spread, (*shape[1:], SHORTEST), stream, first)
    torch.testing.assert_close(place.cpu(), want, rtol=FLOATS[dtype], atol=1e-5)
    assert not memory[:, shape[0] * shape[1] :].any()


@settings(deadline=None, max_examples=25)
@given(STREAMS, NUMBERS, st.integers(1, 3000), st.integers(1, 40))
def test_an_invocation_alone_has_the_bits_that_it_has_among_others(device_draws, device, stream, first, size, apart):
    pool = torch.randint(0, 255, (32, 128), dtype=torch.uint8, device=device)
    wide, row = pool.float(), (max(size // 3, 1), 1, SHORTEST)
    fills = [
        (torch.uint8, lambda place, number: device_draws.fill_pieces(place, pool, stream, number)),
        (torch.int32, lambda place, number: device_draws.fill_integers(place, (-128, 127), stream, number, 20)),
        *(
            (dtype, lambda place, number: device_draws.fill_floats(place, wide, (1.0, 1.0, 0.7), row, stream, number))
            for dtype in FLOATS
        ),
    ]
    for dtype, fill in fills:
        among = torch.zeros(5, size + apart, dtype=dtype, device=device)[:, apart:]
        alone = torch.zeros(1, size, dtype=dtype, device=device)
        fill(among, first)
        fill(alone, first + 3)
        assert torch.equal(alone[0], among[3])
        assert size < 100 or len(among.unique(dim=0)) > 1


def test_integers_reach_both_ends_and_no_further(device_draws, device):
    place = torch.zeros(1, 1 << 16, dtype=torch.int64, device=device)
    device_draws.fill_integers(place, (-128, 127), 5, 0)
    assert (place.min(), place.max()) == (-128, 127)
    assert (place.double().mean() + 0.5).abs() < 2


@pytest.mark.parametrize("span", [(1, 7), (-(1 << 31), (1 << 31) - 1), OF_BOOLS])
def test_rows_of_integers_differ_in_their_range(device_draws, device, span):
    dtype = torch.bool if span == OF_BOOLS else torch.int64
    place = torch.zeros(2, 64 * 4096, dtype=dtype, device=device)
    device_draws.fill_integers(place, span, 5, 0, 4096)
    rows = place.view(128, 4096).double()
    assert rows.mean(-1).std() > 0.05 * rows.std()
    if dtype != torch.bool:
        low, high = span
        assert low <= rows.min() < low + (high - low) / 50 + 1 and high >= rows.max() > high - (high - low) / 50 - 1
        assert (rows.amin(-1) <= low + (high - low) / 4 + 1).all() and (
            rows.amax(-1) >= high - (high - low) / 4 - 1
        ).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "int64", "bool"])
def test_inputs_of_a_gpu_are_the_same_alone_and_among_others(dtype):
    of = definition({"x": tensor(dtype, "M", "D")}, {"M": None, "D": 4096})
    draws = InvocationDraws(of, workload(of, M=16), None, 1)
    place = torch.zeros((9, 16, 4096), dtype=draws.example.inputs[0].dtype, device="cuda")
    draws.fill(7, 100, [place])
    for offset in (0, 4, 8):
        (alone,) = draws.draw(7, 100 + offset, "cuda")
        assert torch.equal(alone.view(torch.uint8), place[offset].view(torch.uint8))
    assert not torch.equal(place[0].view(torch.uint8), place[1].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_a_rule_makes_for_a_gpu_is_valid_and_the_same_alone():
    draws = InvocationDraws(PAGED, workload(PAGED, T=64, L=9, N=40, num_pages=64), None, 1)
    places = [torch.zeros((40, *value.shape), dtype=value.dtype, device="cuda") for value in draws.example.inputs]
    draws.fill(7, 3, places)
    _, indptr, indices, cache = (place.cpu() for place in places)
    assert (indptr[:, 0] == 0).all() and (indptr[:, -1] == 64).all() and (indptr.diff(dim=1) >= 0).all()
    assert indices.min() >= 0 and indices.max() < cache.shape[1]
    assert len(indptr.unique(dim=0)) > 10
    assert torch.equal(draws.draw(7, 20, "cuda")[1], places[1][17])


def test_what_cannot_draw_says_so_before_anything_is_judged():
    if torch.cuda.is_available():
        pytest.skip("Triton has a GPU here")
    with pytest.raises(KcapError, match="inputs cannot be drawn on cpu, which takes Triton and a C compiler"):
        invocations.prepare_draws("cpu")

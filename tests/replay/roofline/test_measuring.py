"""Measuring ceilings: the CPU's for real, the GPU's arithmetic with clocks that are made up, and on a GPU for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handmade import call, request_for, tensor

from kcap.replay.jobs import REPLAY_WORKER
from kcap.replay.roofline import ceilings, measure, measure_cpu, measure_cuda
from kcap.replay.roofline.ceilings import TF32, Ceilings
from kcap.replay.roofline.floor import Rooflines, floor_us
from kcap.schemas.derive.cost import Cost
from kcap.schemas.results.measurement import CACHES, Cache, Measurement
from kcap.system.worker_process import Worker

MIB = 1 << 20
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_cpu, "MIN_SECONDS", 0.001)
    monkeypatch.setattr(measure_cpu, "LARGEST", 1 << 24)
    monkeypatch.setattr(measure_cpu, "MATRICES", (64,))


@pytest.mark.usefixtures("quick")
def test_a_cpus_ceilings_fall_with_the_working_set_and_leave_its_threads_alone():
    before = torch.get_num_threads()
    found = measure.measure("cpu", before)
    assert torch.get_num_threads() == before == found.threads
    assert [level.size for level in found.levels] == [0, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
    rates = [level.gb_s for level in found.levels]
    assert rates == sorted(rates, reverse=True) and rates[0] == measure_cpu.NEAREST_GB_S * before
    assert 0.05 < rates[-1] < 5000 and set(found.tflop_s) == {"float32", "bfloat16", "float64"}
    assert found.cache_bytes > 0 and found.empty_us > 0 and found.device_name and found.torch == torch.__version__


@pytest.mark.usefixtures("quick")
def test_one_threads_work_times_the_threads_is_a_ceiling_where_all_at_once_were_held_up(
    monkeypatch: pytest.MonkeyPatch,
):
    """Eight threads together make 1 GB/s, each alone 3: caches are each core's own, memory is shared by some."""
    alone: list[int] = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", alone.append)
    monkeypatch.setattr(measure_cpu, "bandwidth", lambda size: 1.0 if alone[-1] == 8 else 3.0)
    monkeypatch.setattr(measure_cpu, "arithmetic", lambda dtype: 0.1 if alone[-1] == 1 else 0.2)
    monkeypatch.setattr(measure_cpu, "last_level", lambda: MIB)
    found = measure_cpu.measure()
    assert alone == [8, 1, 8]
    assert [level["gb_s"] for level in found["levels"][1:]] == [24.0, 24.0, 12.0, 12.0]
    assert found["tflop_s"]["float32"] == pytest.approx(0.8)


def test_a_process_of_its_own_measures_and_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """The whole of it, as replay asks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = ceilings.kept_ceilings({"device": "cpu", "device_name": "C", "torch": torch.__version__, "threads": 1})
    assert found.threads == 1 and found.device == "cpu" and len(found.levels) > 4


def fake_gpu(monkeypatch: pytest.MonkeyPatch, gb_s: float, start_us: float) -> None:
    """Kernels that move `gb_s` and take `start_us` to start; a work is the bytes that it moves."""
    monkeypatch.setattr(measure_cuda, "works", lambda size, device: [size])
    monkeypatch.setattr(measure_cuda, "graph_us", lambda work: start_us + work / gb_s / 1e3)


def test_starting_a_kernel_does_not_count_for_the_l2(monkeypatch: pytest.MonkeyPatch):
    fake_gpu(monkeypatch, gb_s=6000, start_us=2)
    assert measure_cuda.in_cache(6 * MIB, 25 * MIB, "cuda:0") == pytest.approx(6000)
    assert measure_cuda.bandwidth(800 * MIB, "cuda:0") == pytest.approx(6000, rel=0.02)


def test_a_larger_working_set_that_took_no_longer_has_no_slope():
    assert measure_cuda.slope(100, 5.0, 5.0, 200) == 200 / 5.0 / 1e3
    assert measure_cuda.slope(1000, 5.0, 6.0, 2000) == 1.0


def test_works_move_what_they_say():
    """On a CPU: copies, a negation, a sum and a fill over one buffer of 64 floats."""
    copied, negated, summed, filled = measure_cuda.works(256, "cpu")
    (target, source) = (cell.cell_contents for cell in reversed(copied.__closure__ or ()))
    copied()
    assert target.numel() == source.numel() == 32 and torch.equal(target, source)
    negated()
    assert torch.equal(target, -source) and summed().dim() == 0
    assert filled().numel() == 64 and bool((source == 1).all())


def test_larger_matrices_are_multiplied_only_while_that_stays_short(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    def make(n: int, device: str) -> Any:
        sizes.append(n)
        return n

    monkeypatch.setattr(measure_cuda, "event_us", lambda n: 2 * n**3 / 1e6 / 0.5)  # 0.5 TFLOP/s
    assert measure_cuda.fastest(make, "cuda:0") == pytest.approx(0.5) and sizes == [4096]
    sizes.clear()
    monkeypatch.setattr(measure_cuda, "event_us", lambda n: 2 * n**3 / 1e6 / (700 if n == 4096 else 800))
    assert measure_cuda.fastest(make, "cuda:0") == pytest.approx(800) and sizes == [4096, 8192]


def test_what_a_gpu_or_torch_cannot_multiply_is_left_out(monkeypatch: pytest.MonkeyPatch):
    def refused(n: int, device: str) -> Any:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")

    monkeypatch.setattr(measure_cuda, "FLOATS", {"float32": lambda n, device: n})
    monkeypatch.setattr(measure_cuda, "QUANTIZED", {"float8_e4m3fn": refused})
    monkeypatch.setattr(measure_cuda, "event_us", lambda n: 2 * n**3 / 1e6)
    assert dict(measure_cuda.arithmetic("cuda:0")) == {"float32": pytest.approx(1.0)}


@pytest.fixture(scope="module")
def found() -> Ceilings:
    return measure.measure("cuda:0")


class TestOnAGpu:
    """What holds of any data-centre GPU since the A100."""

    pytestmark = gpu

    def test_the_l2_is_faster_than_memory_and_both_are_plausible(self, found: Ceilings):
        assert 1.1 * found.memory_gb_s < found.top < 100_000
        assert 500 < found.memory_gb_s < 20_000
        assert found.cache_bytes > MIB and 0.3 < found.empty_us < 10

    def test_narrower_matrices_are_multiplied_faster(self, found: Ceilings):
        rates = found.tflop_s
        assert rates["float32"] < rates[TF32] < rates["bfloat16"] and rates["float16"] > rates[TF32]
        if torch.cuda.get_device_capability() >= (9, 0):
            assert rates["float8_e4m3fn"] > 1.2 * rates["bfloat16"]

    def test_torchs_own_copy_is_above_its_floor_and_not_far(self, found: Ceilings):
        """A large copy, timed apart from the measuring."""
        x, y = (torch.randn(1 << 28, device="cuda:0", dtype=torch.bfloat16) for _ in range(2))
        size = x.numel() * 2
        taken = measure_cuda.event_us(lambda: y.copy_(x))
        assert 1 <= taken / floor_us(Cost(2 * size, size, 0, "bfloat16"), found, "cold") < 1.6

    def test_torchs_own_product_is_above_its_floor_and_not_far(self, found: Ceilings):
        a, b = (torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16) for _ in range(2))
        taken = measure_cuda.event_us(lambda: a @ b)
        product = Cost(3 * 2 * 8192**2, 2 * 2 * 8192**2, 2 * 8192**3, "bfloat16")
        assert 1 <= taken / floor_us(product, found, "warm") < 2

    @pytest.mark.parametrize("cache", CACHES)
    def test_a_linear_layers_weights_are_read_at_no_more_than_the_ceiling_in_any_cache_state(self, cache: Cache):
        """As replay times it: 48 MiB of weights, which memory or the L2 gives."""
        weight = tensor(6144, 4096, dtype="bfloat16", storage=1, device="cuda:0")
        linear = call("aten::linear", tensor(16, 4096, dtype="bfloat16", device="cuda:0"), weight)
        session = {"device": "cuda", "home": "cuda", "root": None, "operators": [], "threads": None, "cache": cache}
        with Worker(session, REPLAY_WORKER) as worker:
            answer = worker.run(request_for(linear, 0.1), 120)
            told = {**worker.environment, **answer, "call": 0, "operator": "aten::linear"}
        one = Rooflines().judge(Measurement.model_validate(told))
        assert one.status == "ok", one.reason
        assert one.work is not None and one.work.flops == 2 * 16 * 6144 * 4096
        assert one.roofline is not None and 1 <= one.roofline.times < (3 if cache == one.cache == "cold" else 8)

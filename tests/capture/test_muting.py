"""Calls inside recorded aten operators are kept from the observer, and nothing but the cost shows it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

import kcap
from kcap.capture.recorder import native_recorder
from kcap.schemas.recording.recording import Recording
from kcap.system import native_build

Record = Callable[..., Recording]
Mute = Callable[[bool], int]
Python = Callable[..., "subprocess.CompletedProcess[str]"]
A = torch.randn(4, 4)
B = torch.randn(2, 4, 4)


@torch.library.custom_op("kcapmute::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return linear(x, A) + 1


@torch.library.custom_op("kcapmute::region", mutates_args=())
def region(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.kcapmute.kernel(x) + torch.ops.kcapmute.kernel(layer_norm(x, (4,)))


@pytest.fixture
def mute() -> Iterator[Mute]:
    """`mute(False)` ends the muting, `mute(True)` allows it; how many pointers are exchanged then."""
    lib = ctypes.PyDLL(str(native_recorder.build()))
    yield lambda allowed: int(lib.kcap_mute(int(allowed)))
    lib.kcap_mute(1)


def nested() -> object:
    return linear(B, A), layer_norm(A, (4,)), scaled_dot_product_attention(B, B, B), A[1:, None], A.to(torch.float64)


def custom() -> object:
    return torch.ops.kcapmute.region(A), torch.ops.kcapmute.kernel(A)


def raising() -> None:
    for broken in (lambda: linear(B, torch.ones(3, 3)), lambda: scaled_dot_product_attention(B, B[:, :, :3], B)):
        with pytest.raises(RuntimeError):
            broken()
        nested()


def backward() -> None:
    weight = A.clone().requires_grad_()
    with torch.enable_grad():
        layer_norm(linear(B, weight), (4,)).sum().backward()


def threads() -> None:
    def work() -> None:
        with torch.no_grad():
            for _ in range(50):
                nested(), custom()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def transforms() -> None:
    torch.vmap(lambda x: linear(x, A))(B), torch.func.grad(lambda x: linear(x, A).sum())(A)


def hidden() -> None:
    torch._C._autograd._enable_record_function(False)
    nested()
    torch._C._autograd._enable_record_function(True)
    nested()


def profiled() -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
        nested(), custom()
    nested()


def told(recording: Recording) -> tuple[Any, ...]:
    known = recording.metadata
    calls = Counter(call.model_dump_json(exclude={"id"}) for call in recording.calls)
    programs = [[call.operator for call in recording.ran(program)] for program in recording.programs]
    return calls, programs, known.totals, known.dropped, known.steps


@pytest.mark.parametrize(
    "body", [nested, custom, raising, backward, threads, transforms, hidden, profiled], ids=lambda body: body.__name__
)
def test_a_recording_is_the_same_with_and_without_muting(
    body: Callable[[], object], record: Record, mute: Mute
) -> None:
    exchanged = []

    def run(allowed: bool, recorder: Any) -> None:
        exchanged.append(mute(allowed))
        body()
        for phase in ("prefill", "decode", "decode"):
            with recorder.step(phase):
                nested(), body()

    recordings = [record(partial(run, allowed)) for allowed in (True, False, True)]
    first, *rest = [told(recording) for recording in recordings]
    assert rest == [first, first]
    assert exchanged[0] == exchanged[2] > 0 == exchanged[1]
    assert {call.parent for call in recordings[0].calls} <= {None, "kcapmute::region", "kcapmute::kernel"}


def seen_by_a_profiler(_: Path) -> Counter[str]:
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        nested(), custom()
    return Counter(event.name for event in profiler.events() if "::" in event.name)


def seen_by_a_trace(path: Path) -> Counter[str]:
    observer = ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    with torch.no_grad():
        nested(), custom()
    observer.stop()
    observer.unregister_callback()
    return Counter(node["name"] for node in orjson.loads(path.read_bytes())["nodes"] if "::" in node["name"])


@pytest.mark.parametrize("seen", [seen_by_a_profiler, seen_by_a_trace])
def test_another_observer_sees_what_it_sees_without_kcap(
    seen: Callable[[Path], Counter[str]], record: Record, tmp_path: Path
) -> None:
    def see() -> Counter[str]:
        return seen(tmp_path / "trace.json")

    before = see()
    during: list[Any] = []
    assert before["aten::native_layer_norm"] > 0  # inside aten::layer_norm
    record(lambda _: during.extend([nested(), see(), nested(), see()]))
    assert during[1::2] == [before, before]
    assert see() == before


# What a library would call, read from its own table of pointers.
LIBRARY = """
extern "C" void asked() __asm__("_ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE");
extern "C" void* target() { return reinterpret_cast<void*>(&asked); }
extern "C" void** pointer() {
  void** found;
  asm("leaq _ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE@GOTPCREL(%%rip), %0" : "=r"(found));
  return found;
}
"""


@pytest.fixture(params=["locked", "open"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ctypes.CDLL]:
    """Loads a library whose pointers the loader leaves read-only, or writable."""

    def load() -> ctypes.CDLL:
        path, torch_libs = tmp_path / "library.so", Path(torch.__file__).parent / "lib"
        path.with_suffix(".cpp").write_text(LIBRARY)
        how = ["-Wl,-z,now,-z,relro"] if request.param == "locked" else ["-Wl,-z,lazy,-z,norelro"]
        flags = [*"-shared -fPIC -fno-plt -O1".split(), *how, f"-L{torch_libs}", "-Wl,--no-as-needed", "-ltorch_cpu"]
        subprocess.run([native_build.compiler(), path.with_suffix(".cpp"), "-o", path, *flags], check=True)
        lib = ctypes.CDLL(str(path))
        lib.target.restype = lib.pointer.restype = ctypes.c_void_p
        return lib

    return load


def protections(lib: ctypes.CDLL) -> list[str]:
    return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if lib._name in line]


def test_a_library_gets_its_pointer_back(library: Callable[[], ctypes.CDLL], record: Record, mute: Mute) -> None:
    lib = library()
    real, pages = lib.target(), protections(lib)
    during: list[Any] = []
    record(lambda _: during.extend([lib.target(), protections(lib), mute(True)]))
    assert (lib.target(), protections(lib)) == (real, pages)
    assert during[0] != real and during[1] == pages
    assert mute(True) == 0
    record(lambda _: during.extend([lib.target(), protections(lib), mute(True)]))
    assert during[:3] == during[3:]
    assert (lib.target(), protections(lib)) == (real, pages)


def test_a_library_loaded_while_a_window_is_open_waits_for_the_next(
    library: Callable[[], ctypes.CDLL], record: Record, mute: Mute
) -> None:
    found: list[Any] = []
    record(lambda _: found.extend([mute(True), lib := library(), lib.target(), mute(True), lib.target(), mute(True)]))
    before, lib, real, after, exchanged, again = found
    assert after == again == before + 1
    assert exchanged != real == lib.target()


@pytest.mark.parametrize("library", ["open"], indirect=True)
def test_a_pointer_that_somebody_else_changed_since_stays_theirs(
    library: Callable[[], ctypes.CDLL], record: Record
) -> None:
    lib = library()
    pointer = ctypes.c_void_p.from_address(lib.pointer())
    assert pointer.value == lib.target()

    def body(_: Any) -> None:
        pointer.value = ctypes.addressof(pointer)

    record(body)
    assert lib.target() == ctypes.addressof(pointer)
    record(lambda _: None)
    assert lib.target() == ctypes.addressof(pointer)


def test_closing_while_another_thread_is_inside_is_harmless(record: Record) -> None:
    over, expected = threading.Event(), scaled_dot_product_attention(B, B, B)
    wrong = []

    def work() -> None:
        with torch.no_grad():
            while not over.is_set():
                wrong.extend([0] * (not torch.equal(scaled_dot_product_attention(B, B, B), expected)))

    worker = threading.Thread(target=work)
    worker.start()
    totals = [record(lambda _: [nested() for _ in range(20)]).metadata.totals["kernels"] for _ in range(5)]
    over.set()
    worker.join()
    assert not wrong and min(totals) > 0


UNKNOWN = """
import ctypes, sys
from pathlib import Path
import torch, kcap
from kcap.capture.recorder import native_recorder
native_recorder.SOURCE = Path(sys.argv[1])
x = torch.randn(4, 4)
with torch.no_grad(), kcap.record(sys.argv[2], recorder="native"):
    for _ in range(10):
        torch.nn.functional.linear(x, x)
    print(ctypes.PyDLL(str(native_recorder.build())).kcap_mute(1))
"""


def test_a_torch_without_that_function_is_recorded_all_the_same(python: Python, tmp_path: Path) -> None:
    source = shutil.copytree(native_recorder.SOURCE.parent, tmp_path / "taps") / "dispatcher.cpp"
    header = source.parent / "native" / "muting.h"
    header.write_text(header.read_text().replace("_ZN2at27getStep", "_ZN2at27getNone"))
    ran = python(UNKNOWN, source, tmp_path / "out")
    assert (ran.returncode, ran.stdout.strip()) == (0, "0"), ran.stderr
    assert {call.operator: call.total for call in kcap.load(tmp_path / "out").kernels()} == {"aten::linear": 10}

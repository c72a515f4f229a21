"""The ATen operators of a fused kernel, as the tap finds them in generated code and keeps them with the kernel."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest
from shard_lines import MATRIX, Line, call, step_lines, write_shard

from kcap.capture.fold.recording import fold_session
from kcap.capture.hooks.patching import Methods
from kcap.capture.session import Session
from kcap.capture.shards.counts import KERNELS
from kcap.capture.taps.external import Externals
from kcap.capture.taps.kernels.fragments import (
    CACHE_TAG,
    HEAD,
    LINE,
    Annotations,
    annotate,
    bound_in,
    fragment_file,
    fragment_of,
    keep_apart,
)
from kcap.capture.taps.kernels.launches import Kernel, Launches
from kcap.errors import FormatError
from kcap.schemas.merge.recordings import merge_recordings
from kcap.schemas.recording import seal
from kcap.schemas.recording.signature import call_key
from kcap.schemas.validation.recording import check_recording
from kcap.schemas.validation.report import Report

WRAPPER = """
# kernel path: /home/someone/cache/ab/cab.py
# Source node to ATen node mapping:
#   their_name => add
# Graph fragment:
#   %arg0_1 : Tensor "f32[4][1]cuda:0" = PlaceHolder[target=arg0_1]
#   return %add
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
def triton_poi_fused_add_0(in_ptr0): pass
def call(args):
    triton_poi_fused_add_0.run(*args, stream=stream0)  # torch's benchmark of it
    triton_poi_fused_add_0.run(*args, stream=stream0)
''', device_str='cuda')


triton_poi_fused_mul_1 = async_compile.triton('triton_poi_fused_mul_1', '''
''', device_str='cuda')

class Runner:
    def call(self, args):
        buf9 = buf8; del buf8  # reuse
        buf2 = buf1; del buf1  # reuse
        triton_poi_fused_add_0.run(buf2, arg0_1, 4, stream=stream0)
        triton_poi_fused_add_0.run(buf3, arg7_1, 4, stream=stream0)
"""
TOLD = (
    '%arg0_1 : Tensor "f32[4][1]cuda:0" = PlaceHolder[target=arg0_1]\nreturn %add\nreuse(buf2, buf1)\n'
    "call(buf2, arg0_1, 4, stream=stream0)\n"
)


@pytest.fixture
def scope(tmp_path: Path) -> dict[str, Any]:
    """The globals of a generated module."""
    file = tmp_path / "cwrapper.py"
    file.write_text(WRAPPER)
    return {"__file__": str(file)}


def test_a_fragment_is_the_comment_above_its_kernel_and_its_first_call(scope: dict[str, Any]) -> None:
    assert fragment_of(scope, "triton_poi_fused_add_0") == TOLD


def test_neither_paths_nor_names_of_the_users_program_are_in_it(scope: dict[str, Any]) -> None:
    told = str(fragment_of(scope, "triton_poi_fused_add_0"))
    assert "someone" not in told and "their_name" not in told


@pytest.mark.parametrize("name", ["triton_poi_fused_mul_1", "triton_poi_fused_add", "elsewhere"])
def test_a_kernel_without_a_comment_of_its_own_has_none(scope: dict[str, Any], name: str) -> None:
    assert fragment_of(scope, name) is None


@pytest.mark.parametrize("text", [None, b"\xff\xfe", b""])
def test_a_wrapper_that_cannot_be_read_costs_the_fragment(tmp_path: Path, text: bytes | None) -> None:
    file = tmp_path / "cwrapper.py"
    if text is not None:
        file.write_bytes(text)
    assert fragment_of({"__file__": str(file)}, "triton_poi_fused_add_0") is None
    assert fragment_of({}, "triton_poi_fused_add_0") is None


def test_the_name_of_a_kernel_is_that_in_the_nearest_caller() -> None:
    kernel = object()
    scope: dict[str, Any] = {"kernel_3": kernel, "bound_in": bound_in, "sys": sys}
    exec("def call(value): return bound_in(sys._getframe(0), value)", scope)
    place = scope["call"](kernel)
    assert place is not None and place[0] is scope and place[1] == "kernel_3"
    assert scope["call"](object()) is None


class Scheduling:
    """As inductor's class that defines kernels."""

    def define_kernel(self, source: str, nodes: list[Any], kernel: Any) -> str:
        return f"{source} of {len(nodes)}"


def test_a_comment_that_cannot_be_completed_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("generating")
    module.Scheduling = Scheduling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "generating", module)
    annotations = Annotations("generating", "Scheduling")
    annotations.install()
    assert Scheduling().define_kernel("code", [SimpleNamespace()], None) == "code of 1"
    assert "comments not completed" in annotations.trouble  # there is no graph that inductor compiles
    annotations.uninstall()
    assert not hasattr(Scheduling.define_kernel, "__wrapped__")


def test_a_kernel_that_is_defined_by_keywords_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("generating")
    module.Scheduling = Scheduling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "generating", module)
    annotations = Annotations("generating", "Scheduling")
    annotations.install()
    assert Scheduling().define_kernel(source="code", nodes=[], kernel=None) == "code of 0"
    annotations.uninstall()


def generating(line: SimpleNamespace) -> Any:
    """While inductor generates a wrapper whose last line is `line`."""
    from torch._inductor.virtualized import V

    return V.set_graph_handler(SimpleNamespace(wrapper_code=SimpleNamespace(lines=[line], comment="#")))  # type: ignore[arg-type]


def test_a_kernel_that_was_defined_before_and_is_only_called_again_is_no_trouble() -> None:
    with generating(SimpleNamespace(kernel_name="kernel")):
        annotate("kernel", [])


@pytest.mark.parametrize("text", ["%a = f(x\nimport os)", "%a = f(x\rimport os)", "%a = f(\0)", "%a = f(\ud800)"])
def test_text_of_an_operator_never_becomes_code_of_the_wrapper(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = SimpleNamespace(kernel_name="kernel", metadata=(told := f"{HEAD}\n{LINE}return %a"))
    monkeypatch.setattr("kcap.capture.taps.kernels.fragments._missing", lambda single: [text])
    with generating(line), pytest.raises(ValueError, match="no comment"):
        annotate("kernel", [])
    assert line.metadata == told
    monkeypatch.setattr("kcap.capture.taps.kernels.fragments._missing", lambda single: ["%a = buf0"])
    with generating(line):
        annotate("kernel", [])
    assert line.metadata == f"{told}\n{LINE}%a = buf0"


COMPILES = """
from concurrent.futures import ThreadPoolExecutor

import torch
from torch._dynamo.utils import counters

from kcap.capture.hooks.patching import Methods
from kcap.capture.taps.kernels.fragments import keep_apart


def is_hit():
    torch.compiler.reset()
    counters.clear()
    torch.compile(lambda x: x @ x)(torch.ones(8, 8))  # no kernel: none is compiled
    return bool(counters["inductor"]["fxgraph_cache_hit"])


def in_thread():
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(is_hit).result()


torch.compiler.config.cache_key_tag = "mine"
found = [is_hit(), is_hit(), in_thread()]
methods = Methods()
keep_apart(methods)
found += [is_hit(), is_hit(), in_thread(), in_thread()]
torch.compiler.config.cache_key_tag += " now"
found += [is_hit(), is_hit()]
methods.undo()
found += [in_thread(), is_hit()]
print(*found, torch.compiler.config.cache_key_tag)
"""


def test_what_is_compiled_while_recorded_is_cached_apart(tmp_path: Path) -> None:
    """The comments of what was compiled before are not complete; what is compiled now is no concern of others."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, env=environment)
    told = ran.stdout.split()
    everywhere = told[2:3] == ["True"]  # whether torch's configuration is every thread's, as before 2.13
    before, recorded, own, after = (
        [False, True, everywhere],
        [False, True, everywhere, True],
        [False, True],
        [not everywhere, everywhere],
    )
    assert told == [*map(str, [*before, *recorded, *own, *after]), "mine", "now"], ran.stderr


def test_what_torch_compiles_ahead_of_a_start_lies_apart_while_recorded() -> None:
    from torch._dynamo.package import DynamoCache

    plain, methods = DynamoCache.path_prefix(), Methods()
    keep_apart(methods)
    try:
        assert Path(DynamoCache.path_prefix()) == Path(plain, CACHE_TAG)
    finally:
        methods.undo()
    assert DynamoCache.path_prefix() == plain


COMBINES = """
from unittest import mock

import torch
import torch._inductor.config as config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode

from kcap.capture.taps.kernels.fragments import Annotations, _in_text

Annotations("torch._inductor.codegen.triton", "TritonScheduling").install()
import torch._inductor.codegen.triton

config.cpu_backend, config.combo_kernels, config.fx_graph_cache = "triton", True, False
ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(lambda scheduler: scheduler._topological_sort_nodes())
for bound in ("combo_kernel_peak_memory_increase_gb", "combo_kernel_peak_memory_pct_threshold"):
    if hasattr(config, bound):  # of torch 2.15, which else groups in its own way
        setattr(config, bound, None)
generate, texts = GraphLowering.codegen, []


def codegen(graph):
    result = generate(graph)
    texts.append(result[0].value)
    return result


with (
    mock.patch.object(GraphLowering, "codegen", codegen),
    mock.patch.object(AsyncCompile, "triton", lambda *args, **kwargs: mock.Mock()),
    mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: ""),
):
    torch.compile(lambda x: torch.cat([x[:, 4:].sin(), x[:, :4] - 1], 1))(torch.ones(8, 8))
print(_in_text(texts[0], "triton_poi_fused_0"))
"""


def test_kernels_that_run_as_one_have_the_operators_of_all(tmp_path: Path) -> None:
    """vLLM has inductor combine kernels; of those torch itself writes down no operator. Only code is generated here."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", COMBINES], capture_output=True, text=True, env=environment)
    assert "aten.sin.default" in ran.stdout and "aten.sub.Tensor" in ran.stdout, ran.stderr
    assert "return %sin,%sub" in ran.stdout


def test_a_class_that_is_not_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "generating", ModuleType("generating"))
    annotations = Annotations("generating", "Scheduling")
    annotations.install()
    assert not annotations.trouble


def test_a_launch_names_its_fragment_and_one_of_another_is_another(tmp_path: Path) -> None:
    lines: list[Any] = []
    recorder = SimpleNamespace(launch=lambda body: lines.append(orjson.loads(body)) or len(lines) - 1)
    launches = Launches(Externals(SimpleNamespace(recorder=recorder), tmp_path))  # type: ignore[arg-type]
    kernels = [
        Kernel(0, [], [], {"function": "k", **more}) for more in ({}, {"fragment": "a.txt"}, {"fragment": "b.txt"})
    ]
    numbers = [launches.launch(kernel, [1], [], None, None, {}) for kernel in [*kernels, *kernels]]
    assert numbers == [0, 1, 2, 0, 1, 2]
    assert [line.get("fragment") for line in lines] == [None, "a.txt", "b.txt"]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    session = Session(str(tmp_path / "shards"))
    session.write()
    return session


def launched(number: int, fragment: str | None) -> Line:
    launch = {"function": "k", "unread": "no", "grid": [4], **({"fragment": fragment} if fragment else {})}
    return call(number, "triton::k", MATRIX, launch=launch)


def keep(session: Session, text: str) -> str:
    directory = Path(session.directory) / KERNELS
    directory.mkdir(exist_ok=True)
    (directory / fragment_file(text)).write_text(text)
    return fragment_file(text)


def test_calls_of_one_kernel_from_several_places_are_one_call_with_one_fragment(
    session: Session, tmp_path: Path
) -> None:
    first, second = sorted(keep(session, text) for text in ("return %a\n", "return %b\n"))
    write_shard(session, 0, [launched(0, None), launched(1, second), *step_lines([0, 1])], [5])
    write_shard(session, 1, [launched(0, first), *step_lines([0])], [2])
    recording = fold_session(session, tmp_path / "out")
    (kernel,) = recording.calls
    assert kernel.total == 12 and kernel.launch is not None and kernel.launch.fragment == first
    assert [path.name for path in (recording.path / "kernels").iterdir()] == [first]


def test_a_call_is_the_same_whatever_torch_told_of_its_kernel(session: Session, tmp_path: Path) -> None:
    untold = Session(str(tmp_path / "untold"))
    untold.write()
    write_shard(untold, 0, [launched(0, None), *step_lines([0])], [3])
    write_shard(session, 0, [launched(0, keep(session, "return %a\n")), *step_lines([0])], [3])
    one, two = fold_session(untold, tmp_path / "one"), fold_session(session, tmp_path / "two")
    assert one.calls != two.calls and call_key(one.calls[0]) == call_key(two.calls[0])
    (both,) = merge_recordings([one, two]).calls
    assert both.total == 6


def test_the_seal_holds_for_fragments_too(session: Session, tmp_path: Path) -> None:
    name = keep(session, "return %a\n")
    write_shard(session, 0, [launched(0, name), *step_lines([0])], [1])
    recording = fold_session(session, tmp_path / "out")
    assert seal.holds(recording.metadata.seal, [name]) and not seal.holds(recording.metadata.seal, [])


def checked(path: Path) -> str:
    """What `kcap validate` finds wrong."""
    report = Report()
    check_recording(report, path)
    return " ".join(map(str, report.problems))


def test_a_fragment_that_was_changed_is_refused(session: Session, tmp_path: Path) -> None:
    name = keep(session, "return %a\n")
    write_shard(session, 0, [launched(0, name), *step_lines([0])], [1])
    recording = fold_session(session, tmp_path / "out")
    launch = recording.calls[0].launch
    assert launch is not None and recording.fragment(launch) == "return %a\n"
    assert hashlib.sha256(b"return %a\n").hexdigest() == Path(name).stem
    assert "launch.fragment" not in checked(recording.path)
    (recording.path / "kernels" / name).write_text("return %b\n")
    assert "launch.fragment" in checked(recording.path)
    with pytest.raises(FormatError, match="the Recording was changed"):
        recording.fragment(launch)

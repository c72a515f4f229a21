"""What foreign code does in a sandbox, with all that this machine has, costs only itself."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sandboxes import Judge, Report, SandboxError

from kcap.bench.sandbox import namespaces, probe

MIB = 1 << 20
HERE = {piece for piece, state in probe().items() if state == "holds"}
NAMED = "['cuda-EvtHandlr', 'cuda-EvtHandlr']"
NAMED_IN_CHILDREN = [f"itself {NAMED}", f"forked {NAMED}", "started"]


def needs(*pieces: str) -> pytest.MarkDecorator:
    lacking = [piece for piece in pieces if piece not in HERE]
    return pytest.mark.skipif(bool(lacking), reason=f"this machine has no {', '.join(lacking)}")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    folder = tmp_path_factory.mktemp("scratch")
    judge = Judge(folder)
    yield judge
    assert judge.sandbox("says", "still here").log == "still here\n"
    judge.close()


def held(report: Report) -> bool:
    """Everything tried was refused, and nothing is left."""
    lines = report.log.splitlines()
    return bool(lines) and all(line.startswith("held") for line in lines) and report.left_nothing()


def test_ordinary_solution_works(judge: Judge) -> None:
    report = judge.sandbox("ordinary", sandbox={"memory": 4096 * MIB})
    cwd = f"cwd {judge.folder} descriptor 1"
    lines = ["torch 300.0 numpy 3.0", "g++", "text", "thread", "child -9", cwd]
    pool = ["pool [1, 2]"] if "own /dev/shm" in report.held else []
    assert report.log.splitlines()[: len(lines) + len(pool)] == [*lines, *pool]
    assert report.left_nothing()


def test_solution_can_compile_and_run_what_it_compiled(judge: Judge) -> None:
    report = judge.sandbox("compiles", sandbox={"memory": 4096 * MIB})
    assert (report.log.strip(), report.ended) == ("compiled", "exit code 0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("body", "printed"), [("on_gpu", "gpu 512.0"), ("triton_on_gpu", "gpu 1000.0")])
def test_cuda_works_inside(body: str, printed: str, judge: Judge) -> None:
    """Twice: what CUDA needed the first time it must find again. Memory has no limit, as CUDA reserves addresses."""
    for _ in range(2):
        report = judge.sandbox(body, sandbox={"memory": None, "disk": 1024 * MIB, "processes": 1024}, seconds=300)
        assert (report.log.strip().splitlines()[-1:], report.ended) == ([printed], "exit code 0"), report.log
        assert report.left_nothing()


@pytest.mark.parametrize("body", ["hang", "busy", "ignores_signals", "last_words", "close_everything"])
def test_solution_that_never_ends_is_ended(body: str, judge: Judge) -> None:
    report = judge.sandbox(body, seconds=3 if body == "last_words" else 0.7)
    assert (report.ended, report.late) == ("ended by the judge", True)
    assert report.left_nothing()
    if body == "last_words":
        assert report.log == "last words and these"


@pytest.mark.parametrize(
    ("body", "arguments", "ended"),
    [
        ("leave", (0,), "exit code 0"),
        ("leave", (7,), "exit code 7"),
        ("exits", (3,), "exit code 3"),
        ("fails", (), "exit code 1"),
        ("kill_self", (), "SIGKILL"),
        ("kill_group", (), "SIGKILL"),
        ("segfault", (), "SIGSEGV"),
    ],
)
def test_end_is_told_as_it_was(body: str, arguments: tuple[int, ...], ended: str, judge: Judge) -> None:
    report = judge.sandbox(body, *arguments)
    assert (report.ended, report.late) == (ended, False)
    assert report.left_nothing()


def test_exception_is_printed_with_its_traceback(judge: Judge) -> None:
    assert "ValueError: wrong in the body" in judge.sandbox("fails").log


@pytest.mark.parametrize("then_hang", [False, True])
def test_daemons_do_not_outlive_the_solution(then_hang: bool, judge: Judge) -> None:
    report = judge.sandbox("daemons", then_hang, seconds=1 if then_hang else 30)
    assert report.late == then_hang
    assert report.left_nothing()


def test_process_that_forks_and_ends_again_and_again_is_caught(judge: Judge) -> None:
    assert judge.sandbox("runaway", seconds=0.7).left_nothing()


@needs("processes")
def test_fork_bomb_is_bounded(judge: Judge) -> None:
    report = judge.sandbox("fork_bomb", sandbox={"processes": 40})
    assert report.log.startswith("held EAGAIN")
    assert report.left_nothing()


def test_memory_without_end_is_an_error_in_the_solution(judge: Judge) -> None:
    report = judge.sandbox("eat_memory", sandbox={"memory": 128 * MIB})
    assert int(report.log.split()[2]) <= 128
    assert report.left_nothing()


def test_shared_memory_is_bounded_too(judge: Judge) -> None:
    report = judge.sandbox("eat_shared_memory", sandbox={"memory": 128 * MIB})
    assert int(report.log.split()[2]) <= 128 + 8192
    assert report.left_nothing()


@pytest.mark.parametrize("body", ["kill_parent", "stop_parent", "kill_parent_after_daemons"])
def test_parent_cannot_be_signalled(body: str, judge: Judge) -> None:
    report = judge.sandbox(body, seconds=2)
    assert held(report)
    assert report.late


@pytest.mark.parametrize("target", [1, -1, None])
def test_no_process_outside_can_be_signalled(target: int | None, judge: Judge) -> None:
    report = judge.sandbox("kill", target or judge.pid, judge.pid)
    assert "NOT TRIED" not in report.log
    assert report.left_nothing()
    if target != -1 or "pid namespace" in report.held:
        assert held(report)


def test_working_directory_that_is_deleted_is_nobody_elses(judge: Judge) -> None:
    report = judge.sandbox("delete_cwd")
    assert (report.ended, report.log) == ("exit code 0", "[]\n")
    assert judge.folder.is_dir()


@pytest.mark.parametrize("body", ["fill_disk", "big_file", "many_files"])
def test_disk_is_bounded(body: str, judge: Judge) -> None:
    report = judge.sandbox(body, sandbox={"disk": 32 * MIB})
    assert held(report) or "more than" in report.ended
    assert report.left_nothing()


def test_no_file_outside_the_scratch_can_be_made_or_changed(judge: Judge, tmp_path: Path) -> None:
    victim = tmp_path / "dataset.json"
    victim.write_text("true")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    places = [
        victim,
        tmp_path / "new",
        "/tmp/kcap-sandbox-new",
        Path.home() / "kcap-sandbox-new",
        Path.cwd() / "sandbox-new",
    ]
    assert held(judge.sandbox("write", *places))
    assert held(judge.sandbox("remove", victim))
    assert held(judge.sandbox("change_mode", victim))
    assert victim.read_text() == "true"
    assert not any(Path(place).exists() for place in places[1:])


def test_kernel_switches_cannot_be_turned(judge: Judge) -> None:
    for without in ((), ("own user",), ("landlock",), ("landlock", "own user"), ("mount namespace",)):
        if "own /proc" in HERE or "landlock" not in without:
            assert held(judge.sandbox("write_kernel_switch", without=without))


@needs("own /proc")
def test_threads_can_be_named_by_others_of_their_process(judge: Judge) -> None:
    """Without which CUDA does not start. User 0 may so only in the candidate itself."""
    own = "own user" in HERE or os.geteuid() != 0
    report = judge.sandbox("name_threads", own)
    assert report.log.splitlines() == NAMED_IN_CHILDREN[: 3 if own else 1]
    assert report.left_nothing()


@pytest.mark.skipif(not namespaces.effective_capabilities() >> 24 & 1, reason="only CAP_SYS_RESOURCE can forbid it")
def test_who_dies_first_cannot_choose_to_live(judge: Judge) -> None:
    assert held(judge.sandbox("live_longer"))


@needs("own /proc")
def test_all_of_proc_but_the_solutions_processes_is_read_only(judge: Judge) -> None:
    for without in ((), ("own user",), ("landlock", "own user"), ("no capabilities",)):
        assert judge.sandbox("open_proc", without=without).log == "[]\nTrue\n"


@needs("own /proc")
def test_keeper_cannot_be_written_to(judge: Judge) -> None:
    for without in ((), ("landlock",), ("own user",), ("landlock", "own user")):
        assert held(judge.sandbox("write_supervisor", without=without))


@needs("hidden folders")
def test_hidden_folder_is_empty_or_closed(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "expected").mkdir()
    secret = tmp_path / "expected" / "output"
    secret.write_text("secret")
    seen = {"sandbox": {"hidden": [str(tmp_path)]}}
    assert held(judge.sandbox("read", secret, **seen))
    assert "expected" not in judge.sandbox("names", tmp_path, **seen).log
    assert judge.sandbox("read", Path(__file__)).log.startswith("DONE b")


@needs("hidden folders", "landlock")
@pytest.mark.parametrize("without", [(), ("landlock",), ("mount namespace",)])
def test_hidden_device_cannot_be_opened(judge: Judge, without: tuple[str, ...]) -> None:
    """As the files of other GPUs are."""
    seen = {"sandbox": {"hidden": ["/dev/full"]}, "without": without}
    assert judge.sandbox("open_device", "/dev/full", without=without).log == "DONE None\n" * 2
    assert held(judge.sandbox("open_device", "/dev/full", **seen))


@needs("opened folders", "own user")
def test_of_a_closed_folder_only_what_is_needed_is_seen(judge: Judge, tmp_path: Path) -> None:
    """Its Python may lie in one: that no longer takes the capability to read what others have."""
    closed, scratch = tmp_path / "closed", tmp_path / "closed" / "scratch"
    scratch.mkdir(parents=True)
    (closed / "key").write_text("secret")
    closed.chmod(0o700)
    inside = {"sandbox": {"folder": str(scratch)}}
    assert judge.sandbox("write", "file", **inside).log == "DONE 7\n"
    assert held(judge.sandbox("read", closed / "key", **inside))
    assert "no capabilities" in judge.sandbox("read", closed / "key", **inside).held


@needs("memory of all")
def test_memory_that_no_process_counts_is_bounded(judge: Judge) -> None:
    small = {"sandbox": {"memory": 64 * MIB}}
    assert judge.sandbox("maps_shared_memory", 64, **small).log == "DONE\n"
    report = judge.sandbox("maps_shared_memory", 1024, **small)
    assert (report.ended, report.log) == ("SIGKILL", "") and report.left_nothing()


@needs("hidden folders")
def test_scratch_inside_of_a_hidden_folder_still_works(judge: Judge, tmp_path: Path) -> None:
    scratch = tmp_path / "out" / "scratch"
    scratch.mkdir(parents=True)
    (tmp_path / "out" / "outcomes.jsonl").write_text("secret")
    seen = {"sandbox": {"hidden": [str(tmp_path)], "folder": str(scratch)}}
    assert judge.sandbox("write", "file", **seen).log == "DONE 7\n"
    assert held(judge.sandbox("read", tmp_path / "out" / "outcomes.jsonl", **seen))


@pytest.mark.parametrize("body", ["trace", "read_memory", "read_environment", "limit_judge"])
def test_judge_cannot_be_looked_into(body: str, judge: Judge) -> None:
    assert held(judge.sandbox(body, judge.pid))


@pytest.mark.parametrize("body", ["connect", "send_datagram"])
def test_network_is_out_of_reach(body: str, judge: Judge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        assert held(judge.sandbox(body, listener.getsockname()[1]))
        with pytest.raises(TimeoutError):
            listener.accept()


def test_abstract_sockets_of_others_are_out_of_reach(judge: Judge) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0kcap-sandbox-test")
        listener.listen()
        assert held(judge.sandbox("connect_abstract", "kcap-sandbox-test"))


def test_output_is_cut_and_never_waited_for(judge: Judge) -> None:
    report = judge.sandbox("flood", sandbox={"printed": 5000})
    assert (len(report.log), report.ended) == (5000, "exit code 0")
    assert report.left_nothing()


def test_no_descriptor_is_inherited(judge: Judge) -> None:
    assert judge.sandbox("descriptors").log == "[0, 1, 2]\n"


def test_no_privilege_can_be_won(judge: Judge) -> None:
    assert held(judge.sandbox("new_privileges"))
    assert held(judge.sandbox("raise_limits"))
    if "own user" in HERE:
        assert held(judge.sandbox("become_root"))


@needs("seccomp")
def test_system_calls_under_other_numbers_are_refused(judge: Judge) -> None:
    assert held(judge.sandbox("old_numbers"))


def test_next_sandbox_starts_with_an_empty_scratch_unless_it_goes_on(judge: Judge) -> None:
    first = judge.sandbox("write", "built", keep=True)
    assert judge.sandbox("read", "built", keep=True).log == "DONE b'written'\n"
    assert judge.sandbox("read", "built").log == "DONE b'written'\n"
    report = judge.sandbox("names", ".")
    assert report.after == first.before
    if "scratch" in report.held:
        assert report.log == "DONE []\n"
    assert report.left_nothing()


def test_scratch_that_goes_on_is_confined_as_the_first(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    seen = {"sandbox": {"hidden": [str(tmp_path)]}}
    first = judge.sandbox("nothing", keep=True, **seen)
    second = judge.sandbox("read", tmp_path / "secret", **seen)
    assert sorted(second.held) == sorted(first.held)
    assert second.log.startswith("held") or "hidden folders" not in HERE
    assert second.after == first.before
    assert held(judge.sandbox("kill", 1, judge.pid))


def test_folder_with_the_interpreter_cannot_be_hidden(judge: Judge) -> None:
    with pytest.raises(SandboxError, match="holds no code"):
        judge.sandbox("nothing", sandbox={"hidden": [sys.prefix]})


def test_scratch_must_be_there(judge: Judge, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="must be a folder"):
        judge.sandbox("nothing", sandbox={"folder": str(tmp_path / "none")})


def test_many_cages_leave_nothing(judge: Judge) -> None:
    reports = [judge.sandbox("nothing") for _ in range(20)]
    assert all(report.ended == "exit code 0" and report.left_nothing() for report in reports)
    assert reports[0].before == reports[-1].after

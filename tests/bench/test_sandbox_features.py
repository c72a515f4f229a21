"""The parts of the confinement that can be looked at without confining anything."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.sandbox import (
    HOLDS,
    SandboxSpec,
    landlock,
    libc,
    memory_group,
    namespaces,
    open_sandbox,
    probe,
    process_tree,
    seccomp,
)
from kcap.bench.sandbox.sandboxed_process import ExitStatus
from kcap.bench.sandbox.spec import Features
from kcap.errors import KcapError

OWN = 4242
MACHINES = ["x86_64", "aarch64"]
ALLOW, FAIL = 0x7FFF0000, 0x00050000
ARGUED = (seccomp.CLONE, seccomp.CLONE3, seccomp.SOCKET, seccomp.PRLIMIT, seccomp.FCNTL)
TABLES = (seccomp.REFUSED_CALLS, seccomp.SIGNAL_CALLS, seccomp.OWN_PROCESS_ONLY, seccomp.UNCOUNTED_CALLS)
NAMED = (*ARGUED, *(numbers for table in TABLES for numbers in table.values()))


def verdict(program: seccomp.Program, architecture: int, number: int, *arguments: int) -> int:
    """Run the filter as the kernel does: the error that a call fails with, 0 where it passes."""
    loads = {0: number, 4: architecture, **{16 + 8 * place: value for place, value in enumerate(arguments)}}
    at = accumulator = 0
    while True:
        code, yes, no, operand = program[at]
        at += 1
        if code == 0x06:
            assert operand == ALLOW or operand & 0xFFFF0000 == FAIL
            return 0 if operand == ALLOW else operand & 0xFFFF
        if code == 0x20:
            accumulator = loads.get(operand, 0)
        else:
            tests = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }
            at += yes if tests[code] else no


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 1000), loose=st.booleans(), arguments=st.tuples(*[st.integers(0, 2**32 - 1)] * 6))
def test_filter_refuses_what_is_listed_and_nothing_else(
    machine: str, number: int, loose: bool, arguments: tuple[int, ...]
) -> None:
    column, architecture = seccomp.ARCHITECTURES[machine]
    program = seccomp.build(machine, not loose, not loose, not loose, not loose, OWN)
    answer = verdict(program, architecture, number, *arguments)
    if number in {numbers[column] for numbers in seccomp.REFUSED_CALLS.values()}:
        assert answer == errno.EPERM
    elif number not in {numbers[column] for numbers in NAMED}:
        assert answer == 0
    assert verdict(program, architecture ^ 1, number, *arguments) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_looks_at_arguments(machine: str) -> None:
    column, architecture = seccomp.ARCHITECTURES[machine]

    def tight(numbers: tuple[int, int], *arguments: int) -> int:
        return verdict(seccomp.build(machine, True, True, True, True, OWN), architecture, numbers[column], *arguments)

    def loose(numbers: tuple[int, int], *arguments: int) -> int:
        return verdict(
            seccomp.build(machine, False, False, False, False, OWN), architecture, numbers[column], *arguments
        )

    threads, new_users, new_network = 0x3D0F00, 0x10000011, 0x40000011
    for judged in (tight, loose):
        assert judged(seccomp.CLONE, threads) == 0
        assert judged(seccomp.CLONE, new_users) == judged(seccomp.CLONE, new_network) == errno.EPERM
        assert judged(seccomp.CLONE3) == errno.ENOSYS
        assert judged(seccomp.SOCKET, 1) == judged(seccomp.SOCKET, 16) == 0
    kill, thread = seccomp.OWN_PROCESS_ONLY["kill"], seccomp.OWN_PROCESS_ONLY["tgkill"]
    for numbers in (kill, thread):
        assert tight(numbers, OWN, 9) == 0
        for other in (1, 0, 2**32 - 1):
            assert (tight(numbers, other, 9), loose(numbers, other, 9)) == (errno.EPERM, 0)
    for family in (2, 10, 17):
        assert (tight(seccomp.SOCKET, family), loose(seccomp.SOCKET, family)) == (errno.EPERM, 0)
    assert tight(seccomp.PRLIMIT, 0) == tight(seccomp.PRLIMIT, OWN) == 0
    assert (tight(seccomp.PRLIMIT, 7), loose(seccomp.PRLIMIT, 7)) == (errno.EPERM, 0)
    assert [tight(seccomp.FCNTL, 5, command) for command in (3, 8, 10, 15)] == [0, *[errno.EPERM] * 3]
    for numbers in seccomp.UNCOUNTED_CALLS.values():
        assert (tight(numbers), loose(numbers)) == (errno.EPERM, 0)


def test_numbers_of_another_abi_are_refused() -> None:
    program = seccomp.build("x86_64", False, False, False, False, OWN)
    assert verdict(program, seccomp.ARCHITECTURES["x86_64"][1], 0x40000000 + 1) == errno.EPERM


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="numbers of two architectures are known")
def test_numbers_are_those_of_the_kernel_headers() -> None:
    column, _ = seccomp.ARCHITECTURES[platform.machine()]
    named = {**seccomp.REFUSED_CALLS, **seccomp.SIGNAL_CALLS, **seccomp.OWN_PROCESS_ONLY, **seccomp.UNCOUNTED_CALLS}
    named["clone"] = seccomp.CLONE
    named |= {"clone3": seccomp.CLONE3, "fcntl": seccomp.FCNTL, "socket": seccomp.SOCKET}
    source = "#include <sys/syscall.h>\n" + "\n".join(f"known_{name} __NR_{name}" for name in named)
    try:
        done = subprocess.run(
            ["cc", "-E", "-P", "-x", "c", "-"], input=source, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler with the kernel's headers")
    numbers = {name: int(value) for name, value in re.findall(r"known_(\w+)\s+(\d+)\b", done.stdout)}
    assert len(numbers) > 50
    assert numbers == {name: named[name][column] for name in numbers}


NAMES = st.sampled_from("abc")
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: "/".join(parts))


@given(folders=st.lists(PATHS, max_size=6), hidden=st.lists(PATHS, max_size=3))
def test_what_is_shown_is_all_but_what_is_hidden(
    folders: list[str], hidden: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("tree")
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "file").touch()
    covered = [root / path for path in hidden]
    shown = list(landlock._shown(root, covered))
    for file in root.rglob("file"):
        seen = any(file.is_relative_to(path) for path in shown)
        assert seen != any(file.is_relative_to(path) for path in covered)


def test_everything_is_shown_by_one_rule_where_nothing_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert list(landlock._shown(tmp_path, [])) == [tmp_path]


def test_link_into_a_hidden_folder_does_not_show_it(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hidden")
    assert list(landlock._shown(tmp_path, [tmp_path / "hidden"])) == []


def test_children_are_found_with_and_without_the_kernels_list() -> None:
    with subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '100'])"]) as process:
        deadline = time.monotonic() + 20
        while not process_tree.descendants(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        (sleeper,) = process_tree.descendants(process.pid)
        assert process_tree.children(process.pid) == process_tree._children_by_scan(process.pid) == [sleeper]
        assert process.pid in process_tree.children(os.getpid())
        assert process_tree.kill_all(lambda: process_tree.descendants(process.pid))
        process.kill()
    assert not process_tree.alive(sleeper)


def test_piece_that_fails_is_left_out_with_its_reason() -> None:
    features = Features(frozenset({"off"}))

    def fail() -> None:
        raise OSError(errno.EPERM, "unshare: not here")

    assert [features.attempt("on", list), features.attempt("off", list), features.attempt("new", fail)] == [
        True,
        False,
        False,
    ]
    assert features.held == ["on"]
    assert features.refused == {"off": "switched off", "new": "unshare: not here"}


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_proc_in_which_something_stays_open_is_not_opened(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []

    def mount(source: str | None, target: str, kind: str | None, wanted: int) -> None:
        if len(flags) == fails_at:
            raise OSError(errno.EPERM, "mount: not here")
        flags.append(wanted)

    monkeypatch.setattr(libc, "mount", mount)
    namespaces._mount_proc(writable=True)
    assert len(flags) == fails_at
    assert flags[0] & libc.MS_RDONLY and all(wanted & (libc.MS_RDONLY | libc.MS_BIND) for wanted in flags)


def test_machine_that_has_nothing_says_so_for_every_piece() -> None:
    everything = {*probe(), "user namespace"}
    bare = probe(frozenset(everything))
    assert {state for piece, state in bare.items() if piece not in namespaces.MOUNTED} <= {
        "switched off",
        "needs a mount namespace",
    }
    assert HOLDS not in bare.values()


def test_who_asks_what_holds_stays_what_it_was() -> None:
    probe()
    adopts = ctypes.c_int()
    libc.prctl(37, ctypes.cast(ctypes.byref(adopts), ctypes.c_void_p))
    assert adopts.value == 0


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (ExitStatus(code=3), "exit code 3"),
        (ExitStatus(signal=11), "SIGSEGV"),
        (ExitStatus(signal=9, note="wrote more than 8 bytes"), "SIGKILL (wrote more than 8 bytes)"),
        (ExitStatus(signal=40), "signal 40"),
        (ExitStatus(), "ended by the judge"),
    ],
)
def test_end_is_put_in_words(ended: ExitStatus, text: str) -> None:
    assert str(ended) == text


def test_pieces_that_the_kernel_offers_are_used() -> None:
    """Else a piece that breaks would only skip the tests that need it."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = probe()
    always = {"no new privileges", "limits", "dies first"}
    if platform.machine() in MACHINES and "Seccomp" in status:
        always.add("seccomp")
    with contextlib.suppress(OSError):
        always |= {"landlock"} | ({"landlock signals"} if landlock.abi() >= 6 else set())
    admin = int(status["CapEff"], 16) >> 21 & 1
    if admin:
        always |= {"pid namespace", "mount namespace", "network namespace", "ipc namespace", *namespaces.MOUNTED}
    assert {piece: found[piece] for piece in always} == dict.fromkeys(always, HOLDS)


def test_process_that_fails_to_fork_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    monkeypatch.setattr(libc, "prctl", lambda *_: 0)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KcapError, match="temporarily unavailable"):
        open_sandbox(SandboxSpec(tmp_path, None, 1 << 20, 8), 1, lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_opened_before_the_limit_fell_is_closed_too() -> None:
    ask = """if True:
        import os, resource
        from kcap.bench.sandbox.confinement import close_others
        kept, other = (os.dup2(0, number) for number in (200, 300))
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        close_others([kept])
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        print(os.listdir("/proc/self/fd"))
    """
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "['0', '1', '2', '3', '200']\n"


def test_guarded_process_cannot_be_dumped() -> None:
    ask = "import ctypes; from kcap.bench.sandbox import guard; guard(); print(ctypes.CDLL(None).prctl(3))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_a_process_lives_whatever_it_calls_itself() -> None:
    """Its name need not be text."""
    program = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe (', 0, 0, 0); print(flush=True)\nwhile True: pass"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None and named.stdout.readline()
        try:
            assert process_tree.alive(named.pid) and not process_tree.still(named.pid)
            assert not process_tree.confined(named.pid) and named.pid in process_tree.below(os.getpid())
        finally:
            named.kill()


def test_a_group_that_a_killed_process_left_is_no_hindrance():
    """Numbers of processes come again."""
    try:
        left = memory_group.open_group(1 << 30)
    except OSError as error:
        pytest.skip(f"no cgroup may be made here: {error}")
    left.close()
    memory_group.open_group(1 << 30).remove()

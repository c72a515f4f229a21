"""A machine that refuses some of the confinement: the rest holds, and what does not hold is said."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandboxes import NAMESPACES, Judge, Report
from test_sandbox import HERE, NAMED, NAMED_IN_CHILDREN, held, needs

PLAIN = 65000
EVERYTHING = (*NAMESPACES, "own user", "no capabilities", "landlock", "seccomp")
LACKING = {
    "no namespaces": NAMESPACES,
    "no user": ("own user",),
    "no landlock": ("landlock",),
    "no seccomp": ("seccomp",),
    "no pid namespace": ("pid namespace",),
    "no mounts": ("mount namespace",),
    "no capabilities dropped": ("no capabilities",),
    "namespaces and user": (*NAMESPACES, "own user"),
    "only landlock": (*NAMESPACES, "own user", "seccomp"),
    "only seccomp": (*NAMESPACES, "own user", "landlock"),
    "landlock without signals": (*NAMESPACES, "own user", "landlock signals"),
    "only limits": EVERYTHING,
}


@pytest.fixture(scope="module", params=["root", "user"])
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """As root, and as a plain user: whose namespaces need one of users."""
    if os.geteuid() != 0 and request.param == "root":
        pytest.skip("not root here")
    plain = os.geteuid() == 0 and request.param == "user"
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        judge = Judge(scratch(Path(folder), PLAIN if plain else None), PLAIN if plain else None, light=True)
        yield judge
        judge.close()


def scratch(place: Path, owner: int | None) -> Path:
    folder = place / f"scratch{len(list(place.iterdir()))}"
    folder.mkdir()
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder


@pytest.fixture(params=LACKING.values(), ids=LACKING.keys())
def without(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


def test_what_is_left_out_is_said_and_the_rest_holds(judge: Judge, without: tuple[str, ...]) -> None:
    report = judge.sandbox("nothing", without=without)
    assert report.ended == "exit code 0"
    assert not set(without) & set(report.held)
    assert {name for name in without if name in report.refused} >= set(without) & HERE - {"no capabilities"}
    assert "limits" in report.held
    assert report.left_nothing()


def test_nothing_outlives_the_solution(judge: Judge, without: tuple[str, ...]) -> None:
    assert judge.sandbox("daemons", False, without=without).left_nothing()
    assert judge.sandbox("kill_parent_after_daemons", without=without, seconds=0.3).left_nothing()
    assert judge.sandbox("runaway", without=without, seconds=0.3).left_nothing()


@pytest.fixture
def fresh(judge: Judge) -> dict[str, str]:
    """A scratch of the test's own."""
    return {"folder": str(scratch(judge.folder.parent, judge.user))}


def test_solution_can_write_to_its_scratch(judge: Judge, without: tuple[str, ...], fresh: dict[str, str]) -> None:
    assert judge.sandbox("write", "file", without=without, sandbox=fresh).log == "DONE 7\n"


def test_threads_can_be_named(judge: Judge, without: tuple[str, ...]) -> None:
    assert judge.sandbox("name_threads", False, without=without).log == f"itself {NAMED}\n"


@needs("own /proc")
def test_proc_is_as_open_as_cuda_needs_and_no_more(judge: Judge) -> None:
    """Whoever judges, a user of its own or not."""
    for without in ((), ("landlock",)):
        for goes_on in (True, False):
            report = judge.sandbox("name_threads", True, without=without, keep=goes_on)
            assert report.log.splitlines() == NAMED_IN_CHILDREN
        assert judge.sandbox("open_proc", without=without).log == "[]\nTrue\n"
        assert held(judge.sandbox("write_supervisor", without=without))
        assert held(judge.sandbox("write_kernel_switch", without=without))


@needs("own /proc")
def test_user_0_writes_to_no_network_of_the_judge(judge: Judge) -> None:
    report = judge.sandbox("open_proc", without=("own user", "network namespace"))
    assert report.log.splitlines()[1:] == [str(judge.user is not None)]


def test_disk_is_bounded_without_a_scratch_of_its_own(judge: Judge, fresh: dict[str, str]) -> None:
    limits = {**fresh, "disk": 8 << 20}
    report = judge.sandbox("fill_disk_and_wait", without=("mount namespace",), sandbox=limits, seconds=5)
    assert report.ended == "SIGKILL (wrote more than 8388608 bytes)"
    assert report.left_nothing()


def reaches(judge: Judge, without: tuple[str, ...]) -> dict[str, Report]:
    """What one may not: write to the judge's files, read hidden ones, connect, trace, set another process's limits."""
    place = judge.folder.parent / f"place{len(list(judge.folder.parent.iterdir()))}"
    (place / "secret").mkdir(parents=True)
    (place / "secret" / "file").write_text("secret")
    (place / "victim").touch()
    for path, mode in ((place, 0o777), (place / "victim", 0o666)):
        path.chmod(mode)
    seen = {"sandbox": {"hidden": [str(place / "secret")]}, "without": without}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return {
            "write": judge.sandbox("write", place / "victim", **seen),
            "read": judge.sandbox("read", place / "secret" / "file", **seen),
            "connect": judge.sandbox("connect", listener.getsockname()[1], **seen),
            "datagram": judge.sandbox("send_datagram", listener.getsockname()[1], **seen),
            "limit": judge.sandbox("limit_judge", judge.pid, **seen),
            "memory": judge.sandbox("read_memory", judge.pid, **seen),
        }


@pytest.mark.parametrize(
    ("lacking", "holds"),
    [
        ((), "write read connect datagram limit memory"),
        (NAMESPACES, "write read connect datagram limit memory"),
        (("landlock", "seccomp"), "write read connect datagram limit memory"),
        ((*NAMESPACES, "own user"), "write read connect datagram limit memory"),
        ((*NAMESPACES, "own user", "seccomp"), "write read connect memory"),
        ((*NAMESPACES, "own user", "landlock"), "connect datagram limit"),
    ],
    ids=["all", "no namespaces", "namespaces only", "landlock and seccomp", "landlock only", "seccomp only"],
)
@needs("landlock", "seccomp", "pid namespace", "mount namespace", "network namespace")
def test_each_layer_holds_by_itself(judge: Judge, lacking: tuple[str, ...], holds: str) -> None:
    reports = reaches(judge, lacking)
    assert {name for name, report in reports.items() if held(report)} >= set(holds.split())


def test_without_any_layer_all_of_it_would_be_reached(judge: Judge) -> None:
    reports = reaches(judge, EVERYTHING)
    assert {name for name, report in reports.items() if held(report)} <= {"memory", "limit"}
    assert "hidden folders" not in reports["read"].held


@needs("landlock signals", "seccomp")
@pytest.mark.parametrize("without", [(*NAMESPACES, "own user"), (*NAMESPACES, "own user", "landlock")])
def test_judge_cannot_be_signalled_without_a_pid_namespace(judge: Judge, without: tuple[str, ...]) -> None:
    for target in (judge.pid, 1):
        assert held(judge.sandbox("kill", target, judge.pid, without=without))

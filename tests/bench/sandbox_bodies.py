"""What runs inside a sandbox in the tests: hostile and ordinary. Each prints what came of it, `held` where refused."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
Body = Callable[..., None]


def refused(what: Callable[[], object]) -> None:
    """Print `held` if `what` fails as something forbidden does, else what happened."""
    try:
        result = what()
    except OSError as error:
        print("held", errno.errorcode.get(error.errno or 0, str(error)))
    else:
        print("DONE", repr(result)[:200])


def _libc(name: str, *arguments: object) -> int:
    result = getattr(LIBC, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


def nothing() -> None:
    pass


def says(text: str) -> None:
    print(text)


def fails() -> None:
    raise ValueError("wrong in the body")


def exits(code: int) -> None:
    sys.exit(code)


def hang() -> None:
    print("hangs", flush=True)
    time.sleep(1000)


def busy() -> None:
    while True:
        pass


def ignores_signals() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def daemons(then_hang: bool) -> None:
    """Five daemons, forked twice, each in a session of its own, with their output to nowhere."""
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 50)
                LIBC.prctl(1, 0)
                time.sleep(1000)
            os._exit(0)
    if then_hang:
        time.sleep(1000)


def runaway() -> None:
    """A process that is never the same: each forks the next and ends."""
    if os.fork():
        time.sleep(1000)
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()


def fork_bomb() -> None:
    count = 0
    try:
        while count < 200:
            if os.fork() == 0:
                time.sleep(1000)
            count += 1
    except OSError as error:
        print("held", errno.errorcode[error.errno], count)
    else:
        print("DONE", count)


def eat_memory() -> None:
    kept = []
    try:
        while len(kept) < 64:
            kept.append(bytearray(32 << 20))
    except MemoryError:
        print("held at", len(kept) * 32, "MiB")
    else:
        print("DONE")


def eat_shared_memory() -> None:
    kept = []
    try:
        while len(kept) < 64:
            kept.append(mmap.mmap(-1, 256 << 20))
    except OSError:
        print("held at", len(kept) * 256, "MiB")
    else:
        print("DONE")


def leave(code: int) -> None:
    os._exit(code)


def kill(target: int, judge: int) -> None:
    """Kill `target` (a process, 1, or -1 for all), unless the judge can be reached: that would harm others."""
    try:
        os.kill(judge, 0)
    except OSError:
        refused(lambda: os.kill(target, signal.SIGKILL))
    else:
        print("NOT TRIED: the judge can be signalled")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_parent() -> None:
    refused(lambda: os.kill(os.getppid(), signal.SIGKILL))
    time.sleep(1000)


def stop_parent() -> None:
    refused(lambda: os.kill(os.getppid(), signal.SIGSTOP))
    time.sleep(1000)


def kill_parent_after_daemons() -> None:
    daemons(then_hang=False)
    kill_parent()


def kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def delete_cwd() -> None:
    Path("file").write_text("x")
    shutil.rmtree(os.getcwd(), ignore_errors=True)
    print(os.listdir("."))


def fill_disk(name: str = "file") -> None:
    """Files of 8 MiB each until there is an end, at most 128 MiB."""
    written = 0
    try:
        for number in range(16):
            with open(f"{name}{number}", "wb") as file:
                file.write(bytes(8 << 20))
            written += 8
    except OSError as error:
        print("held", errno.errorcode[error.errno or 0], written)
    else:
        print("DONE", written)


def fill_disk_and_wait() -> None:
    with contextlib.suppress(OSError):
        for number in range(8):
            Path(f"file{number}").write_bytes(bytes(4 << 20))
    time.sleep(1000)


def many_files() -> None:
    try:
        for number in range(100_000):
            os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        print("held", errno.errorcode[error.errno or 0], number)
    else:
        print("DONE")


def big_file() -> None:
    with open("big", "wb") as file:
        refused(lambda: file.truncate(1 << 40))


def write(*paths: str) -> None:
    for path in paths:
        refused(lambda path=path: Path(path).write_text("written"))


def remove(*paths: str) -> None:
    for path in paths:
        refused(lambda path=path: os.remove(path))


def change_mode(path: str) -> None:
    refused(lambda: os.chmod(path, 0o777))


def write_kernel_switch() -> None:
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/mm/transparent_hugepage/enabled"):
        if os.path.exists(path):
            refused(lambda path=path: os.close(os.open(path, os.O_WRONLY)))


def open_proc() -> None:
    """What in /proc, but the candidate's processes, is on a mount that lacks one of the flags that it should have."""
    wanted = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
    others = [path for path in Path("/proc").iterdir() if path.name == "1" or not path.name.isdigit()]
    print([str(path) for path in others if not path.is_symlink() and os.statvfs(path).f_flag & wanted != wanted])
    print(os.statvfs("/proc").f_flag & wanted == wanted & ~os.ST_RDONLY)


def write_supervisor() -> None:
    for name in ("mem", "comm", "oom_score_adj", "clear_refs", "coredump_filter", "task/1/comm"):
        refused(lambda name=name: os.close(os.open(f"/proc/1/{name}", os.O_WRONLY)))


def live_longer() -> None:
    refused(lambda: Path("/proc/self/oom_score_adj").write_text("0"))


def name_threads(children: bool) -> None:
    """As libcuda does: a thread opens another's name. In this process, and in a forked and a started child of it."""
    print("itself", _named())
    if children:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            print("forked", _named(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        own = "/proc/$$/task/$$/comm"
        subprocess.run(["sh", "-c", f"printf started > {own} && cat {own}"], check=True)


def _named() -> list[str]:
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    tasks = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
    try:
        for place in tasks:
            with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "w") as file:
                file.write("cuda-EvtHandlr")
        return [Path(place).read_text().strip() for place in tasks]
    finally:
        ending.set()


def maps_shared_memory(mib: int) -> None:
    """Memory that is no process's own data."""
    mapped = mmap.mmap(-1, mib << 20)
    for at in range(0, mib << 20, 4096):
        mapped[at] = 1
    print("DONE", flush=True)


def open_device(path: str) -> None:
    for access in (os.O_RDONLY, os.O_RDWR):
        refused(lambda access=access: os.close(os.open(path, access)))


def read(path: str) -> None:
    refused(lambda: Path(path).read_bytes())


def names(path: str) -> None:
    refused(lambda: sorted(os.listdir(path)))


def trace(pid: int) -> None:
    attach = 16
    refused(lambda: _libc("ptrace", attach, pid, None, None))


def read_memory(pid: int) -> None:
    refused(lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)))


def read_environment(pid: int) -> None:
    refused(lambda: Path(f"/proc/{pid}/environ").read_bytes())


def connect(port: int) -> None:
    def reach() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as channel:
            channel.settimeout(2)
            channel.connect(("127.0.0.1", port))

    refused(reach)


def send_datagram(port: int) -> None:
    def send() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            return channel.sendto(b"x", ("127.0.0.1", port))

    refused(send)


def connect_abstract(name: str) -> None:
    def reach() -> None:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect("\0" + name)

    refused(reach)


def flood() -> None:
    line = b"x" * (1 << 20)
    for _ in range(1024):
        os.write(1, line)


def last_words() -> None:
    print("last words", end="")
    sys.stdout.flush()
    os.write(2, b" and these")
    time.sleep(1000)


def close_everything() -> None:
    os.closerange(0, 1000)
    time.sleep(1000)


def descriptors() -> None:
    print(sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1])


def new_privileges() -> None:
    """Everything by which one might get out."""
    new_users, new_mounts, no_flags = 0x10000000, 0x00020000, 0
    refused(lambda: _libc("unshare", new_users))
    refused(lambda: _libc("unshare", new_mounts))
    refused(lambda: _libc("mount", b"none", b"/", b"tmpfs", no_flags, None))
    refused(lambda: _libc("umount2", os.fsencode(os.getcwd()), 2))
    refused(lambda: _libc("chroot", b"."))
    refused(lambda: _libc("syscall", 298 if os.uname().machine == "x86_64" else 241, None, 0, -1, -1, 0))
    refused(lambda: os.nice(-5))


def become_root() -> None:
    refused(lambda: os.setuid(0))


def raise_limits() -> None:
    for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
        try:
            resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (ValueError, OSError):
            print("held")
        else:
            print("DONE")


def limit_judge(pid: int) -> None:
    """Of 34 years: where nothing holds it, the judge is to live on."""
    refused(lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1 << 30, 1 << 30)))


def old_numbers() -> None:
    """System calls by the numbers of another ABI of the same kernel: getpid of x32."""
    refused(lambda: _libc("syscall", ctypes.c_long(0x40000000 + 39)))


def ordinary() -> None:
    """What an honest Solution may do."""
    import multiprocessing
    import tempfile

    import numpy
    import torch

    torch.set_num_threads(2)
    product = torch.ones(300, 300) @ torch.ones(300, 300)
    print("torch", float(product[0, 0]), "numpy", float(numpy.ones(3).sum()))
    print("g++" if subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout else "nothing")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a").write_text("text")
        os.replace(f"{folder}/a", "moved")
    print(Path("moved").read_text())
    thread = threading.Thread(target=print, args=("thread",))
    thread.start()
    thread.join()
    child = subprocess.Popen(["sleep", "100"])
    child.kill()
    print("child", child.wait())
    print("cwd", os.getcwd(), "descriptor", Path("/dev/null").write_text("x"))
    if os.environ.get("POOL") != "no":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print("pool", pool.map(abs, [-1, -2]))


def compiles() -> None:

    Path("a.cpp").write_text('#include <cstdio>\nint main() { std::puts("compiled"); }\n')
    subprocess.run(["g++", "a.cpp", "-o", "a"], check=True)
    print(subprocess.run(["./a"], capture_output=True, text=True, check=True).stdout)


def on_gpu() -> None:
    """CUDA from its first use on: memory, cuBLAS, a graph, a pinned buffer, a second stream."""
    import torch

    one = torch.ones(512, 512, device="cuda")
    graph, out = torch.cuda.CUDAGraph(), one @ one
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = one @ one
    graph.replay()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.ones(8).pin_memory().to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    print("gpu", float(out[0, 0]))


def triton_on_gpu() -> None:
    """Triton and inductor: a compiler, ptxas, a cache of what they made."""
    import torch

    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HOME"):
        os.environ[name] = os.getcwd()
    doubled = torch.compile(lambda x: torch.sin(x) * 2 + 1)(torch.zeros(1000, device="cuda"))
    print("gpu", float(doubled.sum()))

"""Memory of a GPU that processes share by its descriptor, and whether anything runs there: on a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from kcap.bench.judge.driver.gpu_memory import GpuMemory
from kcap.errors import KcapError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ANOTHER = """
import socket, sys
import torch
from kcap.bench.judge.driver.gpu_memory import GpuMemory
judge = socket.socket(fileno=int(sys.argv[1]))
_, (descriptor,), _, _ = socket.recv_fds(judge, 16, 1)
given = GpuMemory("cuda:0").open(descriptor, int(sys.argv[2]))
given.bytes.add_(1)
torch.cuda.synchronize()
judge.send(b"done")
judge.recv(16)
torch.cuda._sleep(2_000_000_000)
judge.send(b"busy")
torch.cuda.synchronize()
"""

TAKES_TURNS = """
import time
import torch
while True:
    torch.cuda._sleep(4_000_000)
    torch.cuda.synchronize()
    print(flush=True)
    time.sleep(2e-3)
"""


@pytest.fixture(scope="module")
def gpu():
    return GpuMemory("cuda:0")


def test_another_process_writes_what_is_read_here_and_its_kernels_are_noticed(gpu):
    shared = gpu.share(3 << 20)
    shared.bytes.copy_(torch.arange(len(shared.bytes), device="cuda") % 200)
    gpu.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", ANOTHER, str(theirs.fileno()), str(shared.size)]
    ours.settimeout(60)
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as another, ours:  # it ends when that is closed
        theirs.close()
        socket.send_fds(ours, [b"memory"], [shared.descriptor])
        assert ours.recv(16) == b"done"
        assert torch.equal(shared.bytes, (torch.arange(len(shared.bytes), device="cuda") % 200 + 1).byte())
        assert gpu.soon_quiet()
        ours.send(b"go")
        assert ours.recv(16) == b"busy"
        assert not gpu.quiet()
        another.wait()
    assert gpu.soon_quiet()
    shared.close()


def test_what_is_no_memory_of_a_gpu_is_refused(gpu, tmp_path):
    with (tmp_path / "file").open("w+") as file, pytest.raises(KcapError, match="memory cannot be shared"):
        gpu.open(file.fileno(), 1 << 21)


def test_more_than_there_is_cannot_be_mapped(gpu):
    shared = gpu.share(1)
    with pytest.raises(KcapError, match="memory cannot be shared"):
        gpu.open(os.dup(shared.descriptor), 1 << 30)
    shared.close()


def test_others_that_take_turns_are_seen(gpu):
    with subprocess.Popen([sys.executable, "-c", TAKES_TURNS], stdout=subprocess.PIPE) as another:
        assert another.stdout is not None and another.stdout.readline()
        assert gpu.used_by_others()
        another.kill()
    assert not gpu.used_by_others()

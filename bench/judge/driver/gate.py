"""A gate on a GPU, between what a candidate has launched and the inputs that it is launched for.

By the memory operations of CUDA streams: one waits for a word of memory, one writes to it, in whatever process.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

from kcap.bench.judge.driver import protocol
from kcap.errors import KcapError

STUCK_S = 10.0  # that nothing takes beside what waits at a gate
TURN_S = 2.5e-4  # the longest switch of a GPU to another process that is left out of times; an H100 takes 0.14 ms
Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # to where, from where


class StreamWords:
    """Words of memory for which streams wait, and to which they write; KcapError where the driver refuses that."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda = cuda

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Until the word is no less than `value`."""
        self._ask("cuStreamWaitValue32_v2", stream, address, value)

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._ask("cuStreamWriteValue32_v2", stream, address, value)

    def _ask(self, name: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
        where, what = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint32(value)
        if failed := getattr(self._cuda, name)(where, ctypes.c_uint64(address), what, ctypes.c_uint(0)):
            raise KcapError(f"{stream.device}: no gate: {name}: CUDA error {failed}")


class Gate:
    """What a candidate has launched waits at it on the GPU. From when it is opened until all has come through, and what
    it left has been copied, the judge only looks whether it has, and nothing of a candidate runs but on the GPU.

    It opens in two steps. At `value - 1` a kernel that does next to nothing comes through, for which the GPU turns from
    the judge's process to the candidate's (a context switch). At `value` comes what is timed.
    """

    def __init__(self, words: StreamWords, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._words, self._stream, self._address, self._value = words, stream, address, value
        self.began_ns = self.ended_ns = 0
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._opened = self._word.numpy()
        self._turned, self._through = torch.cuda.Event(), torch.cuda.Event()

    def queue(self, copies: Sequence[Copy]) -> None:
        """Ask CUDA for all that is to happen once it is opened."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        try:
            self._queue_step(1, self._value - 1)
            self._turned.record(stream)
            self._queue_step(2, self._value)
            with torch.cuda.stream(stream):
                for to, source in copies:
                    to.copy_(source)
            self._through.record(stream)
        except BaseException:
            self.close()
            raise

    def _queue_step(self, step: int, value: int) -> None:
        """Once it is opened as far as `step`: write `value` to the candidate's word, and wait for it behind."""
        self._words.wait(self._stream, self._word.data_ptr(), step)
        self._words.write(self._stream, self._address, value)
        self._words.wait(self._stream, self._address + protocol.GATE, value)

    def let_through(self) -> None:
        """Open it, whoever waits for what."""
        self._opened[0] = 2

    def open(self) -> None:
        """Let through what is timed. The clock runs from here, or where the GPU turns in TURN_S, from when it has."""
        self.began_ns = time.perf_counter_ns()
        turned, now_ns = self._turns(), time.perf_counter_ns()
        if turned and now_ns - self.began_ns <= TURN_S * 1e9:
            self.began_ns = now_ns
        self.let_through()

    def _turns(self) -> bool:
        self._opened[0] = 1
        return self._reaches(self._turned, TURN_S)

    def passed_within(self, seconds: float) -> bool:
        """Whether all has come through, after so long at most."""
        if not self.ended_ns and self._reaches(self._through, seconds):
            self.ended_ns = time.perf_counter_ns()
        return bool(self.ended_ns)

    def _reaches(self, event: torch.cuda.Event, seconds: float) -> bool:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if event.query():
                return True
        return False

    @property
    def elapsed_ns(self) -> int:
        """0 until all has come through."""
        return self.ended_ns and self.ended_ns - self.began_ns

    def close(self) -> None:
        """Let everything through, and wait until it is; KcapError where it does not get on."""
        if not self.ended_ns:
            self.let_through()
            another = torch.cuda.current_stream(self._stream.device)
            until = time.perf_counter() + STUCK_S
            while not self._stream.query():
                if time.perf_counter() > until:
                    raise KcapError(f"{self._stream.device}: what waits at a gate does not come through")
                self._words.write(another, self._address + protocol.GATE, self._value)  # it may write there, too
                time.sleep(0.001)

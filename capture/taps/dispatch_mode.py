"""The fallback where there is no compiler: a TorchDispatchMode on the thread that runs the steps.

It sees what is dispatched below autograd and composite operators (`t` and `mm` where the native recorder sees
`linear`), on one thread, at some ten times the cost. It ignores compile internals, so that torch.compile is not
disturbed, and is entered again inside custom operators, so that the kernels in them are seen.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kcap.capture.recorder import Ranges
from kcap.capture.shards import CLOSED, FAILED, LOOSE_STEPS, MAX_BATCHES, OVERFLOW, STEPS, TRACED, Counts
from kcap.capture.taps.arguments import Described, describe, describe_values, is_traced, operator_name
from kcap.capture.taps.interning import CallTable

ATEN = ("aten", "prim", "prims")
OTHER = 3  # the phase of what runs outside any step


class _Mode(TorchDispatchMode):
    def __init__(self, recorder: DispatchModeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = self._recorder.saw(func, args, kwargs)
        if at is None or func.namespace in ATEN:
            return func(*args, **kwargs)
        key = _backend_key(func, args, kwargs)
        self._recorder.enter(func)
        try:
            if key is None:
                return func(*args, **kwargs)
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._recorder.left(at)


def _backend_key(func: Any, args: Any, kwargs: Any) -> Any:
    """The dispatch key of a custom operator's own kernel, so that it can run with the mode on; None: run it plainly."""
    if torch.is_grad_enabled():
        return None
    devices = [arg.device.type for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    keys = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
    for name in devices[:1]:
        for key in (keys.get(name), torch._C.DispatchKey.CompositeExplicitAutograd):
            if key is not None and func.has_kernel_for_dispatch_key(key):
                return key
    return None


class DispatchModeRecorder:
    """Interns and counts in Python what the mode sees; its shard has the native recorder's layout."""

    kind = "TorchDispatchMode"
    sees_graphs = False

    def __init__(self, stem: Path, keep_tokens: bool = False, fail_after: int = -1) -> None:
        self._file = open(stem.with_name(stem.name + ".jsonl"), "xb", buffering=0)  # noqa: SIM115
        self._counts = Counts(stem.with_name(stem.name + ".counts"), create=True)
        self._table = CallTable(self._write, keep_tokens)
        self._fail_after = fail_after
        self._mode: _Mode | None = None
        self._mode_thread = 0
        self._open = self._loose = self._stepping = False
        self._sampled, self._capturing = True, False
        self._phase = OTHER
        self._operators: list[tuple[str, Sequence[str], bool, bool]] = []
        self._launches: list[dict[str, Any]] = []
        self._entered: list[tuple[int, bool]] = []  # the places of calls from Python, and which are a library's
        self._program: list[int] = []
        self._details: set[int] = set()  # calls that an operator alone runs are the operator's
        self._stack: list[str] = []
        self._programs: dict[bytes, int] = {}
        self._batches: dict[tuple[int, ...], int] = {}
        self._steps = 0
        self.error = ""
        os.register_at_fork(after_in_child=self._forget)

    # ---- what the mode tells ----

    def saw(self, func: Any, args: Any, kwargs: Any) -> int | None:
        """Record one call; its place in the Program, or None when it is not recorded."""
        if not self._open or self._capturing or (self._stack and self._stack[-1] == "aten"):
            return None
        try:
            if is_traced(args, kwargs):
                self._counts.cells[TRACED] += 1
                return None
            if self._fail_after >= 0:
                self._fail_after -= 1
                if self._fail_after < 0:
                    raise RuntimeError("made to fail")
            parent = self._stack[-1] if self._stack else None
            return self._record(describe(func, args, kwargs, parent), func.namespace in ATEN)
        except Exception as error:
            self._fail(error)
            return None

    def _record(self, call: Described, alone: bool) -> int | None:
        """`alone`: nothing will be recorded in it."""
        number = self._table.intern(call)
        if number is None:
            self._counts.cells[OVERFLOW] += 1
            return None
        if self._sampled or not self._stepping:
            self._table.sample(number, call, self._phase_now(), self._steps if self._stepping else None)
        self._program.append(number)
        if alone and not self._stepping and not self._stack:
            self._count_loose(OTHER)
        return len(self._program) - 1

    def enter(self, func: Any) -> None:
        self._stack.append(operator_name(func._schema))

    def left(self, at: int) -> None:
        """A custom operator ended; what fails here is not its caller's."""
        self._stack.pop()
        try:
            self._settle(at)
        except Exception as error:
            self._fail(error)

    def _settle(self, at: int) -> None:
        if at < len(self._program):  # the step that it began in goes on
            self._settle_call(at, self._program[at + 1 :])
        if not self._stepping and not self._stack:
            self._count_loose(OTHER)

    def _settle_call(self, at: int, inside: list[int]) -> None:
        """A region if another custom operator ran in it, else a kernel without detail."""
        if self._table.is_region(self._program[at]):
            if not inside:
                del self._program[at]
        elif self._runs_kernels(inside):
            self._program[at] = self._table.region(self._program[at])
        else:
            del self._program[at + 1 :]

    def _runs_kernels(self, inside: list[int]) -> bool:
        """Whether kernels ran in a custom operator: a single one that is a detail is the operator's own."""
        custom = [number for number in inside if self._table.is_custom(number)]
        return bool(custom) and (len(custom) > 1 or custom[0] not in self._details)

    # ---- calls that do not come through the dispatcher ----

    def operator(self, name: str, arguments: Sequence[str], work: bool, region: bool = False) -> int:
        self._operators.append((name, arguments, work, region))
        return len(self._operators) - 1

    def launch(self, body: bytes) -> int:
        self._launches.append(orjson.loads(body))
        return len(self._launches) - 1

    def call(self, operator: int, launch: int, values: Sequence[Any], enter: bool, detail: bool) -> bool:
        if self._mode is None or not self._on_its_thread():
            return False
        hidden = (self._stack and self._stack[-1] == "aten") or (detail and self._in_library())
        if not self._open or self._capturing or not (self._stepping or self._loose) or hidden:
            return False
        name, arguments, work, region = self._operators[operator]
        parent = self._stack[-1] if self._stack else None
        launched = self._launches[launch] if launch >= 0 else None
        try:
            at = self._record(describe_values(name, arguments, values, work, parent, launched, region), not enter)
        except Exception as error:
            self._fail(error)
            return False
        if at is not None and detail:
            self._details.add(self._program[at])
        if at is not None and enter:
            self._entered.append((at, not region))
            self._stack.append(name)
        return at is not None

    def leave(self) -> None:
        if self._entered and self._on_its_thread():
            self.left(self._entered.pop()[0])

    def _in_library(self) -> bool:
        return any(library for _, library in self._entered)

    # ---- CUDA graphs: what is called while one is captured does not run, and is not seen ----

    def graph_begin(self, nodes: bool) -> None:
        self._capturing = True

    def graph_nodes(self) -> int:
        return 0

    def graph_end(self, info: bytes, nodes: int) -> int:
        self._capturing = False
        return -1

    def graph_abandon(self) -> None:
        self._capturing = False

    def graph_replay(self, graph: int) -> None:
        raise NotImplementedError  # no graph has a number

    def private_memory(self, ranges: Ranges) -> None:
        """Nothing: no tensor on a GPU is sampled."""

    def group(self, name: str, handle: int, size: int, rank: int, label: str = "") -> None:
        """Nothing: groups stay opaque."""

    # ---- the window and its steps ----

    def start(self, loose: bool) -> None:
        self._loose, self._open = loose, not self.error
        if loose:
            self._push()

    def stop(self) -> None:
        self._open = False
        self._pop()

    def step_begin(self, phase: int, sampled: bool = True) -> None:
        self._phase, self._stepping, self._sampled = phase, True, sampled
        self._program = []
        self._push()

    def step_pause(self) -> None:
        self._stepping = False
        if not self._loose:
            self._pop()

    def step_resume(self) -> None:
        self._stepping = True
        self._push()

    def step_end(self, tokens: int, sequences: int, details: bytes) -> None:
        self.step_pause()
        if self._open:
            try:
                self._count_step(tokens, sequences, details)
            except OSError as error:
                self._fail(error)
        self._program = []

    def step_program(self) -> int:
        self.step_pause()
        program, self._program = self._intern_program(), []
        return program

    def _push(self) -> None:
        if self._mode is None and self._open:
            self._mode, self._mode_thread = _Mode(self), threading.get_ident()
            self._mode.__enter__()

    def _pop(self) -> None:
        """Leave the mode, on its own thread only; elsewhere it stays, and sees a closed recorder."""
        if self._mode is not None and self._on_its_thread():
            self._mode.__exit__(None, None, None)
            self._mode = None

    def _on_its_thread(self) -> bool:
        """Whether this is the thread of the mode, or of the last one."""
        return threading.get_ident() == self._mode_thread

    def _forget(self) -> None:
        self._open = False

    def _phase_now(self) -> int:
        return self._phase if self._stepping else OTHER

    def _count_loose(self, phase: int) -> None:
        for number in self._program:
            self._counts.cells[self._counts.loose(number, phase)] += 1
        self._program = []

    def _count_step(self, tokens: int, sequences: int, details: bytes) -> None:
        index, self._steps = self._steps, self._steps + 1
        program = self._intern_program()
        key = (program, self._phase, tokens, sequences)
        if key not in self._batches and len(self._batches) >= MAX_BATCHES:
            self._count_loose(self._phase)
            self._counts.cells[LOOSE_STEPS + self._phase] += 1
            self._counts.cells[STEPS] += 1
            return
        shape = b'"program":%d,"phase":%d,"tokens":%d,"sequences":%d' % key
        if key not in self._batches:
            self._batches[key] = len(self._batches)
            self._write(b'{"t":"batch","id":%d,%s}\n' % (self._batches[key], shape))
        if details:
            self._write(b'{"t":"step","index":%d,%s%s}\n' % (index, shape, details))
        self._counts.cells[self._counts.batch(self._batches[key])] += 1
        self._counts.cells[STEPS] += 1

    def _intern_program(self) -> int:
        digest = hashlib.sha256(orjson.dumps(self._program)).digest()
        if digest not in self._programs:
            self._programs[digest] = len(self._programs)
            self._write(orjson.dumps({"t": "program", "id": self._programs[digest], "calls": self._program}) + b"\n")
        return self._programs[digest]

    # ---- the shard ----

    def _write(self, line: bytes) -> None:
        self._file.write(line)

    def line(self, text: bytes) -> None:
        try:
            self._write(text + b"\n")
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._open = False
        self.error = f"{type(error).__name__}: {error}"
        self._counts.cells[FAILED] = 1
        try:
            self._write(
                orjson.dumps({"t": "tap", "name": "dispatch_mode", "status": "failed", "detail": self.error}) + b"\n"
            )
        except OSError:
            return  # a full disk: the counter says it

    def close(self) -> None:
        self.stop()
        self._counts.cells[CLOSED] = 1

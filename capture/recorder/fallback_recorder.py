"""The fallback where there is no compiler: a TorchDispatchMode on the thread that runs the steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kcap.capture.recorder.arguments import Described, describe, describe_values, is_traced, operator_name
from kcap.capture.recorder.fallback_tables import CallTable, ShardWriter
from kcap.capture.recorder.recorder import Ranges
from kcap.capture.shards.counts import CLOSED, OVERFLOW, TRACED
from kcap.errors import kind_and_text

OTHER = 3  # the phase of what runs outside any step


class DispatchModeRecorder:
    """Interns and counts in Python what the mode sees; its shard has the native recorder's layout."""

    kind = "TorchDispatchMode"
    sees_graphs = False
    library = ""

    def __init__(self, stem: Path, keep_tokens: bool = False, fail_after: int = -1) -> None:
        self._shard = ShardWriter(stem)
        self._table = CallTable(self._shard.write, keep_tokens)
        self._fail_after = fail_after
        self._modes = threading.local()
        self._mode = self._of_this_thread()  # that of the thread whose calls are recorded
        self._open = self._loose = self._stepping = False
        self._sampled, self._capturing = True, False
        self._phase = OTHER
        self._operators: list[tuple[str, Sequence[str], bool, bool]] = []
        self._launches: list[dict[str, Any]] = []
        self._program: list[int] = []
        self._details: set[int] = set()  # calls that an operator alone runs are the operator's
        self.error = ""

    # ---- calls that the mode sees ----

    def saw(self, mode: Mode, func: Any, args: Any, kwargs: Any) -> int | None:
        """Record one call; its place in the Program, or None when it is not recorded."""
        if mode is not self._mode or not self._listens(mode):
            return None
        try:
            if is_traced(args, kwargs):
                self._shard.cells[TRACED] += 1
                return None
            if self._fail_after >= 0:
                self._fail_after -= 1
                if self._fail_after < 0:
                    raise RuntimeError("made to fail")
            return self._record(describe(func, args, kwargs, mode.parent), func.namespace in ATEN)
        except Exception as error:
            self._fail(error)
            return None

    def _listens(self, mode: Mode) -> bool:
        wanted = self._open and (self._stepping or self._loose) and not self._capturing
        return wanted and not mode.ignored and mode.parent != "aten"

    def _record(self, call: Described, alone: bool) -> int | None:
        """`alone`: nothing will be recorded in it."""
        number = self._table.intern(call)
        if number is None:
            self._shard.cells[OVERFLOW] += 1
            return None
        if self._sampled or not self._stepping:
            self._table.sample(number, call, self._phase_now(), self._shard.steps if self._stepping else None)
        self._program.append(number)
        if alone and not self._stepping and not self._mode.stack:
            self._count_loose(OTHER)
        return len(self._program) - 1

    def left(self, mode: Mode, at: int) -> None:
        """A custom operator ended; what fails here is not its caller's."""
        mode.stack.pop()
        if mode is not self._mode:
            return
        try:
            self._end_call(at)
        except Exception as error:
            self._fail(error)

    def _end_call(self, at: int) -> None:
        if at < len(self._program):  # the step that it began in goes on
            self._classify_region(at, self._program[at + 1 :])
        if not self._stepping and not self._mode.stack:
            self._count_loose(OTHER)

    def _classify_region(self, at: int, inside: list[int]) -> None:
        """A region if another custom operator ran in it, or it is a layer's wrapper; else a kernel without detail."""
        number = self._program[at]
        if self._table.is_region(number):
            if not inside:
                del self._program[at]
        elif self._table.opens(number, inside) or self._runs_kernels(inside):
            self._program[at] = self._table.region(number)
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

    def may_record(self, detail: bool) -> bool:
        mode = self._of_this_thread()
        return mode is self._mode and mode.on and self._listens(mode) and not (detail and mode.in_library)

    def call(self, operator: int, launch: int, values: Sequence[Any], enter: bool, detail: bool) -> bool:
        if not self.may_record(detail):
            return False
        mode = self._of_this_thread()
        name, arguments, work, region = self._operators[operator]
        launched = self._launches[launch] if launch >= 0 else None
        try:
            at = self._record(describe_values(name, arguments, values, work, mode.parent, launched, region), not enter)
        except Exception as error:
            self._fail(error)
            return False
        if at is not None and detail:
            self._details.add(self._program[at])
        if at is not None and enter:
            mode.entered.append((at, not region))
            mode.stack.append(name)
        return at is not None

    def leave(self) -> None:
        mode = self._of_this_thread()
        if mode.entered:
            self.left(mode, mode.entered.pop()[0])

    def ignore_begin(self) -> None:
        self._of_this_thread().ignored += 1

    def ignore_end(self) -> None:
        self._of_this_thread().ignored -= 1

    def replace_begin(self) -> None:
        """Nothing: an operator's own calls are not seen here, whatever they are."""

    def replace_end(self) -> None: ...

    # ---- CUDA graphs: what is called while one is captured does not run, and is not seen ----

    def graph_begin(self, nodes: bool, stream: int = 0) -> None:
        self._capturing = True

    def graph_nodes(self) -> int:
        return 0

    def graph_end(self, info: bytes, nodes: int) -> int:
        self._capturing = False
        return -1

    def graph_abandon(self) -> None:
        self._capturing = False

    def graph_launching(self, graph: int) -> bool:
        raise NotImplementedError  # no graph has a number

    def graph_launched(self) -> None:
        raise NotImplementedError

    def graph_memory(self, ranges: Ranges | None) -> None:
        """Nothing: no tensor on a GPU is sampled."""

    def group(self, name: str, handle: int, size: int, rank: int, label: str = "") -> None:
        """Nothing: groups stay opaque."""

    # ---- the window and its steps ----

    def start(self, loose: bool) -> None:
        self._loose, self._open = loose, not self.error
        if loose and self._mode is self._of_this_thread():  # kcap's own thread opens it, too
            self._push()

    def stop(self) -> None:
        self._open = False
        self._pop()

    def step_begin(self, phase: int, sampled: bool = True, slot: int = -1) -> None:
        """No slot is filled: of what it could hold, what lies on a GPU is not read."""
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
                self._shard.count_step(self._program, self._phase, tokens, sequences, details)
            except OSError as error:
                self._fail(error)
        self._program = []

    def step_program(self) -> int:
        self.step_pause()
        program, self._program = self._shard.program(self._program), []
        return program

    def _push(self) -> None:
        """Record this thread. Where another was, its mode stays there, and nothing is recorded by it."""
        if self._open:
            self._mode = self._of_this_thread()
            self._mode.enter()

    def _pop(self) -> None:
        """Leave the mode of this thread; another's stays, and sees a closed recorder."""
        self._of_this_thread().leave()

    def _of_this_thread(self) -> Mode:
        mode: Mode | None = getattr(self._modes, "mode", None)
        if mode is None:
            mode = self._modes.mode = Mode(self)
        return mode

    def forget(self) -> None:
        self._open = False
        self._shard.forget()

    def _phase_now(self) -> int:
        return self._phase if self._stepping else OTHER

    def _count_loose(self, phase: int) -> None:
        self._shard.count_loose(self._program, phase)
        self._program = []

    # ---- the shard ----

    def line(self, text: bytes) -> None:
        try:
            self._shard.write(text + b"\n")
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._open = False
        self.error = kind_and_text(error)
        self._shard.fail(self.error)

    def close(self) -> None:
        self.stop()
        self._table.finish()
        self._shard.cells[CLOSED] = 1
        self._shard.close()


ATEN = ("aten", "prim", "prims")


class Mode(TorchDispatchMode):
    """The mode of one thread. `stack`: the operators under way there. `entered`: the places of those of them that were
    called from Python, and which are a library's."""

    def __init__(self, recorder: DispatchModeRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.on = False
        self.stack: list[str] = []
        self.entered: list[tuple[int, bool]] = []
        self.ignored = 0

    @property
    def parent(self) -> str | None:
        return self.stack[-1] if self.stack else None

    @property
    def in_library(self) -> bool:
        return any(library for _, library in self.entered)

    def enter(self) -> None:
        if not self.on:
            self.on = True
            self.__enter__()

    def leave(self) -> None:
        if self.on:
            self.on = False
            self.__exit__(None, None, None)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = self._recorder.saw(self, func, args, kwargs)
        if at is None or func.namespace in ATEN:
            return func(*args, **kwargs)
        key = backend_key(func, args, kwargs)
        self.stack.append(operator_name(func._schema))
        try:
            if key is None:
                return func(*args, **kwargs)
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._recorder.left(self, at)


def backend_key(func: Any, args: Any, kwargs: Any) -> Any:
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

"""The recorder of a process: `open_recorder` gives the one that works here.

`recorder` is what every recorder can do. `native_recorder` is the usual one, built from `dispatcher.cpp` and `native/`;
`fallback_recorder` with its `fallback_tables` is used where there is no compiler. `arguments` describes a call's
arguments in the shard's form, and `sampled_arguments` says whose values a Sample keeps.
"""

from __future__ import annotations

from kcap.capture.recorder.recorder import Recorder
from kcap.capture.session import Session


def open_recorder(session: Session) -> tuple[Recorder, str]:
    """The recorder that works here, and why it is not the native one ("" if it is)."""
    from kcap.capture.recorder.fallback_recorder import DispatchModeRecorder
    from kcap.capture.recorder.native_recorder import NativeRecorder
    from kcap.system.native_build import Unavailable

    if session.fail == "load":
        raise RuntimeError("made to fail")
    fail_after = int(session.fail) if session.fail else -1
    reason = "asked for"
    if session.recorder in ("auto", "native"):
        try:
            return NativeRecorder(session.shard(), session.keep_tokens, fail_after), ""
        except (Unavailable, OSError) as error:
            if session.recorder == "native":
                raise
            reason = str(error)
    return DispatchModeRecorder(session.shard(), session.keep_tokens, fail_after), reason

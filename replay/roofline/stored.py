"""Ceilings measured once on a machine and kept in the user's cache, by device, driver, torch and threads."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from kcap.capture.native_build import cache_folder
from kcap.errors import KcapError
from kcap.replay.roofline.ceilings import Ceilings

VERSION = 1  # of how they are measured: a newer one measures again
FIELDS = ("device_name", "driver", "torch", "threads")
LIMIT_S = 300.0

Measure = Callable[[Mapping[str, Any]], Ceilings]


def measured(environment: Mapping[str, Any]) -> Ceilings:
    """The ceilings of a Measurement's `device` and `threads`, in a process of its own; a few seconds.

    KcapError if that process fails.
    """
    threads = [str(environment["threads"])] if environment.get("threads") else []
    command = [sys.executable, "-P", "-m", "kcap.replay.roofline.measure", str(environment["device"]), *threads]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
        return Ceilings.model_validate_json(done.stdout)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise KcapError(f"the ceilings of {environment['device']} cannot be measured: {error}") from None
    except ValidationError:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise KcapError(f"the ceilings of {environment['device']} cannot be measured: {lines[-1][:200]}") from None


def ceilings(environment: Mapping[str, Any], measure: Measure = measured) -> Ceilings:
    """The ceilings kept for `environment` (the fields of a Measurement that name the machine), else measured now."""
    return read(environment) or write(environment, measure(environment))


def raised(environment: Mapping[str, Any], measure: Measure = measured) -> Ceilings:
    """The ceilings, measured again and raised where they turn out higher: the machine may have been busy before."""
    again, before = measure(environment), read(environment)
    return write(environment, before.raised(again) if before else again)


def path_of(environment: Mapping[str, Any]) -> Path:
    """Where the ceilings are kept. A home may be shared by machines: the host's name is part of it."""
    cpus = len(os.sched_getaffinity(0))
    key = [VERSION, platform.node(), cpus, *(environment.get(name) for name in FIELDS)]
    return cache_folder() / "ceilings" / f"{sha256(orjson.dumps(key)).hexdigest()[:16]}.json"


def read(environment: Mapping[str, Any]) -> Ceilings | None:
    """The ceilings kept for `environment`; None if there are none, or none that can be read."""
    try:
        return Ceilings.model_validate_json(path_of(environment).read_bytes())
    except (OSError, ValidationError):
        return None


def write(environment: Mapping[str, Any], found: Ceilings) -> Ceilings:
    """Keep `found`, whole or not at all; a cache that cannot be written to only costs the next measuring."""
    path = path_of(environment)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(found.line())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
    return found

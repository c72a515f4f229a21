"""A judge that runs nothing: `python -m fake_judge`. A Solution's source says, as JSON, what comes of it.

`status`, `us`, `reference_us`, `log`, `wrong`, by Workload under its uuid; `die`: how often the judge dies first;
`sleep`: seconds.
Each request is a line in the file that $FAKE_JOURNAL names: process, Definition, Solution, Workload.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    session = json.loads(sys.stdin.readline())
    if session["device"] == "lost":
        return say({"error": "lost: cannot be used"})
    say({"device": session["device"], "device_name": os.environ.get("FAKE_DEVICE", "Fake"), "torch": "2.0"})
    say({"ready": True})
    for line in sys.stdin:
        say(answer(session, json.loads(line)))


def answer(session: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    solution, workload = request["solution"], request["workload"]["uuid"]
    journal(f"{os.getpid()} {solution['definition']} {solution['name']} {workload}")
    told = json.loads(solution["sources"][0]["content"].splitlines()[0].removeprefix("# "))
    told |= told.get(workload, {})
    time.sleep(told.get("sleep", 0))
    if deaths(session, workload) < told.get("die", 0):
        os.abort()
    return outcome(request, told)


def deaths(session: dict[str, Any], workload: str) -> int:
    """How often this Workload was asked for on this slot before."""
    place = Path(session["scratch"]) / workload
    before = len(place.read_bytes()) if place.exists() else 0
    place.write_bytes(b"x" * (before + 1))
    return before


def outcome(request: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    status = told.get("status", "PASSED")
    found = {
        "solution": "a name that the judge got wrong",
        "definition": "../..",
        "workload": told.get("of", request["workload"]["uuid"]),
        "status": status,
        "reason": None if status == "PASSED" else told.get("reason", "as the source says"),
        "device_name": "Fake",
        "torch": "2.0",
    }
    found |= {name: told[name] for name in ("log", "wrong") if name in told}
    return {**found, **times(told)} if status == "PASSED" else found


def times(told: dict[str, Any]) -> dict[str, Any]:
    def clocked(us: float) -> dict[str, Any]:
        return {"median_us": us, "q1_us": us, "q3_us": us, "samples_us": [us], "cache": "warm"}

    accuracy = {"error": 0.5, "max_absolute_error": 1e-6, "max_relative_error": 1e-6, "compared": 3}
    return {
        "time": clocked(told.get("us", 10)),
        "reference": clocked(told.get("reference_us", 20)),
        "accuracy": accuracy,
    }


def journal(line: str) -> None:
    if path := os.environ.get("FAKE_JOURNAL"):
        with open(path, "a") as file:
            file.write(line + "\n")


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

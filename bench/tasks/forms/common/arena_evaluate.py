"""AgentKernelArena's runner of a task that kcap wrote: one action a call, one line `ARENA_EVAL_RESULT={...}` out.

    evaluate.py validate-task
    evaluate.py baseline|candidate compile|correctness|performance

`kcap judge` does the work; the protocol is `arena-eval-v1`. The baseline is the first candidate, of which the arena
keeps a copy in a workspace of its own: either role judges the Solution of the workspace that this file lies in.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOLUTION = ROOT / "source" / "solution.py"
TASK = ROOT / "scripts" / "task"
METHODS = {"graph": "cuda_graph", "events": "cuda_event_fallback"}  # the arena's names of clocks of a GPU
NO_COMPILER = ("COMPILE_ERROR", "NOT_JUDGED")


def main(arguments: list[str]) -> int:
    role, action = ("task", arguments[0]) if len(arguments) == 1 else (arguments[0], arguments[1])
    try:
        result = validate() if action == "validate-task" else judge(action)
    except (OSError, ValueError, KeyError) as error:
        result = {"status": "FAIL", "cases": [], "reason": f"{type(error).__name__}: {error}"}
    print("ARENA_EVAL_RESULT=" + json.dumps({"protocol": "arena-eval-v1", "role": role, "action": action, **result}))
    return 0 if result["status"] == "PASS" else 1


def cases() -> dict[str, dict[str, Any]]:
    """What the arena knows a case by, by the Workload's id."""
    described = {}
    for line in (TASK / "workloads.jsonl").read_text(encoding="utf-8").splitlines():
        workload = json.loads(line)
        params = {**workload["axes"], "invocations": sum(workload["counts"].values())}
        described[workload["workload"]] = {"test_case_id": workload["workload"], "params": params}
    return described


def validate() -> dict[str, Any]:
    checks = ["correctness", "performance"]
    state = "implemented" if "def run(" in SOLUTION.read_text(encoding="utf-8") else "unimplemented"
    listed = [{**case, "status": "PASS", "checks": checks} for case in cases().values()]
    return {"status": "PASS", "cases": listed, "metadata": {"candidate_state": state}}


def judge(action: str) -> dict[str, Any]:
    quick = ["--quick"] if action == "compile" else []
    command = ["kcap", "judge", str(SOLUTION), "--task", str(TASK), "--trust", "--json", "--fail-on", "never", *quick]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines() or ["kcap judge said nothing"]
    verdict: dict[str, Any] = json.loads(done.stdout or "null") or _unjudged(said[-1])
    if action == "compile":
        built = verdict["status"] not in NO_COMPILER
        return _result(built, [], verdict)
    # the arena wants every case, and those that were not reached are against a Solution
    judged = {workload["workload"]: workload for workload in verdict["workloads"]}
    missing = {"status": verdict["status"] if verdict["status"] != "PASSED" else "NOT_JUDGED"}
    listed = [_case(action, case, judged.get(name, missing)) for name, case in cases().items()]
    return _result(all(case["status"] == "PASS" for case in listed), listed, verdict)


def _unjudged(reason: str) -> dict[str, Any]:
    return {"status": "NOT_JUDGED", "reason": reason, "workloads": []}


def _case(action: str, case: dict[str, Any], workload: dict[str, Any]) -> dict[str, Any]:
    passed = workload["status"] == "PASSED"
    metrics = {key: workload[key] for key in ("speedup", "floor_us", "times_floor") if workload.get(key) is not None}
    row = {**case, "status": "PASS" if passed else "FAIL", "metrics": metrics}
    if not passed:
        wrong = workload["status"] == "INCORRECT_NUMERICAL"
        return {**row, "failure_kind": "numerical_mismatch" if wrong else workload["status"].lower()}
    if action != "performance":
        return row
    time = workload["time"]
    if time["method"] not in METHODS:
        return {**row, "status": "FAIL", "failure_kind": "no_device_time"}
    return {**row, "execution_time_ms": time["median_us"] / 1e3, "benchmark_method": METHODS[time["method"]]}


def _result(passed: bool, listed: list[dict[str, Any]], verdict: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"status": "PASS" if passed else "FAIL", "cases": listed}
    if not passed:
        reason = verdict.get("reason") or "its time is not a GPU's, which is all that the arena takes"
        result["reason"] = f"{verdict['status']}: {reason}"
        kinds = {case["failure_kind"] for case in listed if "failure_kind" in case}
        if len(kinds) == 1:
            result["failure_kind"] = kinds.pop()
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

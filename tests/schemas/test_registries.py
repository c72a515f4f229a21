"""A name is registered once: a second file that takes it is an error, never the one that silently wins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kcap.bench.build import BUILDERS, builder
from kcap.bench.exports import EXPORTERS, exporter
from kcap.bench.run.executors import EXECUTORS, executor
from kcap.schemas.derive import bound_call, cost, families, workload_draft
from kcap.system.registry import Registry

REGISTRATIONS: list[tuple[str, Registry[Any, Any], Any, Callable[[], Callable[[Any], Any]]]] = [
    ("family", families.FAMILIES, "x::op", lambda: families.family("twice", "x::op")),
    ("cost function", cost.COST_FUNCTIONS, "x_type", lambda: cost.cost_function("x_type")),
    ("replay rule", bound_call.REPLAY_RULES, "x::op", lambda: bound_call.replay_rule("x::op")),
    (
        "valid input",
        workload_draft.INPUT_RULES,
        ("x_type", "x*"),
        lambda: families.valid_input("x*", op_types=("x_type",)),
    ),
    ("exporter", EXPORTERS, "x-target", lambda: exporter("x-target")),
    ("executor", EXECUTORS, "x", lambda: executor("x")),
    ("builder", BUILDERS, ("x", None), lambda: builder("x")),
]


@pytest.mark.parametrize(
    ("registry", "key", "register"), [r[1:] for r in REGISTRATIONS], ids=[r[0] for r in REGISTRATIONS]
)
def test_a_second_registration_raises(
    registry: Registry[Any, Any],
    key: Any,
    register: Callable[[], Callable[[Any], Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_items", {})

    class First:
        """Stands for a recognizer, a function, a rule, an exporter: nothing is called."""

    class Second(First): ...

    register()(First)
    with pytest.raises(ValueError, match="registered twice"):
        register()(Second)
    assert list(registry) == [key]

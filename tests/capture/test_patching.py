"""Methods that are replaced: each kind is called as before, and is itself again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kcap.capture.hooks.patching import Methods


class Base:
    def plain(self, x: int) -> tuple[Any, int]:
        return type(self), x

    @classmethod
    def of_class(cls, x: int) -> tuple[Any, int]:
        return cls, x

    @staticmethod
    def static(x: int) -> tuple[Any, int]:
        return None, x


class Heir(Base):
    pass


@pytest.mark.parametrize("owner", [Base, Heir])
@pytest.mark.parametrize(
    ("name", "by_class"),
    [("plain", False), ("of_class", True), ("of_class", False), ("static", True), ("static", False)],
)
def test_a_replaced_method_of_any_kind_gets_its_arguments_and_can_be_put_back(
    name: str, by_class: bool, owner: type[Base]
) -> None:
    seen: list[int] = []

    def around(original: Callable[..., Any], *args: Any) -> Any:
        seen.append(args[-1])
        return original(*args)

    before, methods = dict(vars(owner)), Methods()
    methods.around(owner, name, around)
    caller, told = owner if by_class else owner(), None if name == "static" else owner
    assert (getattr(caller, name)(3), seen) == ((told, 3), [3])
    methods.undo()
    assert dict(vars(owner)) == before
    assert (getattr(caller, name)(4), seen) == ((told, 4), [3])

"""Methods that are replaced: each kind is called as before, and is itself again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kcap.capture.hooks.patching import Methods


class Base:
    @classmethod
    def inherited(cls, x: int) -> tuple[Any, int]:
        return cls, x

    @staticmethod
    def inherited_static(x: int) -> tuple[Any, int]:
        return Owner, x

    def inherited_plain(self, x: int) -> tuple[Any, int]:
        return type(self), x


class Owner(Base):
    def plain(self, x: int) -> tuple[Any, int]:
        return type(self), x

    @classmethod
    def of_class(cls, x: int) -> tuple[Any, int]:
        return cls, x

    @staticmethod
    def static(x: int) -> tuple[Any, int]:
        return Owner, x


OF_CLASS = ("of_class", "static", "inherited", "inherited_static")


@pytest.mark.parametrize(
    ("name", "by_class"),
    [
        ("plain", False),
        ("inherited_plain", False),
        *((name, by_class) for name in OF_CLASS for by_class in (True, False)),
    ],
)
def test_a_replaced_method_of_any_kind_gets_its_arguments_and_can_be_put_back(name: str, by_class: bool) -> None:
    seen: list[int] = []

    def around(original: Callable[..., Any], *args: Any) -> Any:
        seen.append(args[-1])
        return original(*args)

    before, methods = dict(vars(Owner)), Methods()
    methods.around(Owner, name, around)
    owner = Owner if by_class else Owner()
    assert (getattr(owner, name)(3), seen) == ((Owner, 3), [3])
    methods.undo()
    assert dict(vars(Owner)) == before
    assert (getattr(owner, name)(4), seen) == ((Owner, 4), [3])

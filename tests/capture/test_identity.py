"""Values by the identity of their keys."""

from __future__ import annotations

from kcap.capture.hooks.identity import ByIdentity


class Key:
    """Equal to every other, and not to be hashed."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_equal_keys_have_values_of_their_own() -> None:
    values, one, other = ByIdentity[int](), Key(), Key()
    values[one], values[other] = 1, 2
    assert (values.get(one), values.get(other), values.get(Key())) == (1, 2, None)
    values[one] = 3
    assert values.get(one) == 3 and len(values) == 2


def test_a_value_goes_with_its_key() -> None:
    values, key = ByIdentity[list[int]](), Key()
    values[key] = [1]
    values[key] = [2]
    del key
    assert len(values) == 0


def test_a_key_that_is_gone_is_none_that_has_its_address() -> None:
    """Where its end is told late: an object may already lie where it lay."""
    values, key, other = ByIdentity[int](), Key(), Key()
    values[key] = 1
    values._entries[id(other)] = values._entries[id(key)]
    assert values.get(other) is None and values.pop(other) is None
    del key
    assert id(other) in values._entries
    values[other] = 2
    assert values.get(other) == 2


def test_what_is_popped_is_forgotten() -> None:
    values, key = ByIdentity[int](), Key()
    values[key] = 1
    assert values.pop(key) == 1
    assert values.pop(key) is None and len(values) == 0

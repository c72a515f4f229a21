"""What a model library's bytecode tells of the kernels of its cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kcap.capture.taps.relax_vm.library import CACHE_KERNELS, CREATE_CACHE, FIRST_CACHE_KERNEL, Library, parameters

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=30)


def bytecode(forms: list[tuple[str, str]]) -> str:
    """Of a function that makes a cache. A kernel is given directly, in a tuple, in one with a word, or not at all."""
    made, given_as = [], []
    for register, (form, symbol) in enumerate(forms, start=20):
        if form == "direct":
            given_as.append(f"f[{symbol}]")
        elif form == "none":
            made.append(f"  call  vm.builtin.make_tuple in:              dst: %{register}\n")
            given_as.append(f"%{register}")
        else:
            word = "c[25], " if form == "word" else ""
            made.append(f"  call  vm.builtin.make_tuple in: {word}f[{symbol}] dst: %{register}\n")
            given_as.append(f"%{register}")
    others = ", ".join(["%6", *["i1"] * (FIRST_CACHE_KERNEL - 1)])
    return (
        f"@create:\n{''.join(made)}  call  {CREATE_CACHE} in: {others}, {', '.join(given_as)} dst: %19\n  ret   %19\n"
    )


@given(st.lists(st.tuples(st.sampled_from(["direct", "tuple", "word", "none"]), NAMES), min_size=15, max_size=15))
def test_each_kernels_own_name_is_found(forms: list[tuple[str, str]]) -> None:
    symbols = Library("model.so", bytecode(forms)).cache_symbols
    expected = {kernel: symbol for kernel, (form, symbol) in zip(CACHE_KERNELS, forms, strict=True) if form != "none"}
    assert symbols == expected


def test_of_two_ways_to_make_a_cache_none_is_guessed() -> None:
    text = bytecode([("direct", f"kernel{index}") for index in range(15)])
    assert Library("model.so", text).cache_symbols
    assert Library("model.so", text + text.replace("@create", "@create_other")).cache_symbols == {}
    assert Library("model.so", "").cache_symbols == {}


def test_another_number_of_arguments_has_no_names() -> None:
    assert parameters("merge_inplace", 4) == ("v", "s", "v_other", "s_other")
    assert parameters("merge_inplace", 5) == ["arg0", "arg1", "arg2", "arg3", "arg4"]
    assert parameters("", 1) == ["arg0"]

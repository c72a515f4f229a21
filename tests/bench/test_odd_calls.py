"""One Call of any arguments is exported and applied, or refused with a reason; it never takes the others with it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from derived_calls import METADATA, call, linear
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcap.bench.apply.views import NoView, views_of
from kcap.bench.contents import Contents
from kcap.bench.problems import problems_of
from kcap.schemas.derive.bound_call import REPLAY_RULES, BoundCall, replay_rule_for
from kcap.schemas.derive.derive import derive_calls
from kcap.schemas.derive.families import REFUSALS
from kcap.schemas.recording.operators import LAUNCHED
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import Opaque, TensorSpec, Value

assert replay_rule_for("aten::embedding")  # all rules are registered from here on
OPERATORS = sorted(operator for operator in REPLAY_RULES if operator.split("::")[0] not in LAUNCHED)
tensors = st.builds(
    TensorSpec,
    st.lists(st.sampled_from([0, 1, 2, 16]), max_size=4).map(tuple),
    st.sampled_from(["bfloat16", "int32", "int64", "int8", "float8_e4m3fn", "bool"]),
    storage=st.integers(0, 2),
)
others = st.sampled_from([None, True, False, 0, 1, 2, 16, -1, 1e-6, "auto", Opaque("P"), [1, 2]])


@dataclass
class Asked(BoundCall):
    """A Call whose arguments are drawn when its rule first asks for them."""

    data: st.DataObject | None = None

    def index(self, name: str) -> int | None:
        if super().index(name) is None:
            assert self.data is not None
            value: Value = self.data.draw(tensors | tensors | others, name)
            self.args.append(Argument(name=name, value=value, written=isinstance(value, TensorSpec)))
        return super().index(name)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.sampled_from(OPERATORS), st.data())
def test_any_arguments_of_an_operator_with_a_replay_rule(operator: str, data: st.DataObject) -> None:
    asked = Asked(operator, [], data=data)
    with suppress(*REFUSALS):
        replay_rule_for(operator).prepare(asked)
    calls = [linear(0, 1), call(1, operator).model_copy(update={"args": asked.args})]
    contents = Contents(Path("a.kcap"), METADATA)
    vars(contents)["calls"] = calls
    found = problems_of(contents)
    exported = sum(problem.total for problem in found.problems)
    lost = found.ledger.loss("any", contents.total).lost
    assert exported + sum(one.count for one in lost) == contents.total
    assert all(one.reason for one in lost)


ROUTED = TensorSpec((3, 2), "int32")
SLOTS, BLOCKS, TOTAL = (TensorSpec((size,), "int32", storage=place) for place, size in enumerate((18, 5, 1), 1))
ALIGN: dict[str, Value] = {
    "topk_ids": ROUTED, "num_experts": 4, "block_size": 4, "sorted_token_ids": SLOTS, "experts_ids": BLOCKS,
    "num_tokens_post_pad": TOTAL, "maybe_expert_map": None,
}  # fmt: skip
EMPTY_ROWS: dict[str, Value] = {"weight": TensorSpec((9, 0), "bfloat16"), "indices": TensorSpec((5,), "int64")}


@pytest.mark.parametrize(
    ("operator", "arguments", "reason"),
    [
        ("_moe_C::moe_align_block_size", ALIGN, "^the numbers of padded tokens were not sampled$"),
        ("aten::embedding", EMPTY_ROWS, "^kcap cannot read it: RuntimeError: cannot reshape"),
    ],
)
def test_an_output_that_is_not_known_without_values_has_no_view(
    operator: str, arguments: dict[str, Value], reason: str
) -> None:
    (kernel,) = derive_calls([call(0, operator, **arguments)], METADATA).kernels
    assert kernel.family
    with pytest.raises(NoView, match=reason):
        views_of(kernel.definition, kernel.uses[0])

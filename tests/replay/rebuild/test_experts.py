"""Experts that a graph chose by itself, of which no Sample holds anything, are drawn so that every index is valid."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import replay_rule_for
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec, Value

TOKENS, TOP_K, EXPERTS, BLOCK = 5, 3, 8, 4
SLOTS = TOKENS * TOP_K


def prepared(
    operator: str, constants: dict[str, Value], sampled: dict[str, torch.Tensor] | None = None, **arguments: Value
) -> BoundCall:
    args = [Argument(name=name, value=value) for name, value in arguments.items()]
    bound = BoundCall(operator, args, constants=constants)
    for name, values in (sampled or {}).items():
        bound.set_content(name, values)
    replay_rule_for(operator).prepare(bound)
    return bound


def ints(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "int32", device="cuda")


def floats(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bfloat16", device="cuda")


def content(bound: BoundCall, name: str) -> torch.Tensor:
    values = bound.content(name)
    assert values is not None, name
    return values


def fused(sampled: dict[str, torch.Tensor] | None = None, **more: Value) -> BoundCall:
    arguments: dict[str, Value] = {
        "a_ptr": floats(TOKENS, 16), "b_ptr": floats(EXPERTS, 32, 16), "c_ptr": floats(TOKENS, TOP_K, 32),
        "sorted_token_ids_ptr": ints(SLOTS + EXPERTS * (BLOCK - 1)), "expert_ids_ptr": ints(12),
        "num_tokens_post_padded_ptr": ints(1), "num_valid_tokens": SLOTS,
    }  # fmt: skip
    constants: dict[str, Value] = {"BLOCK_SIZE_M": BLOCK, "top_k": TOP_K}
    return prepared("triton::fused_moe_kernel", constants, sampled, **{**arguments, **more})


def test_each_slot_is_in_a_block_of_its_expert() -> None:
    bound = fused()
    slots, experts = content(bound, "sorted_token_ids_ptr"), content(bound, "expert_ids_ptr")
    used = int(content(bound, "num_tokens_post_padded_ptr"))
    assert used % BLOCK == 0 and used // BLOCK <= len(experts)
    of_blocks = slots[:used].reshape(-1, BLOCK)
    assert sorted(of_blocks[of_blocks < SLOTS].tolist()) == list(range(SLOTS))
    owner = {int(slot): int(experts[i]) for i, block in enumerate(of_blocks) for slot in block if slot < SLOTS}
    for token in range(TOKENS):
        assert len({owner[token * TOP_K + choice] for choice in range(TOP_K)}) == TOP_K


@pytest.mark.parametrize(("rows", "top_k"), [(TOKENS, TOP_K), (SLOTS, 1)])
def test_outputs_of_one_row_a_slot_have_experts_too(rows: int, top_k: int) -> None:
    """As SGLang's, of whose up and down products the inputs have a row for each token and for each slot."""
    bound = fused(c_ptr=floats(SLOTS, 32), a_ptr=floats(rows, 16))
    slots, experts = content(bound, "sorted_token_ids_ptr"), content(bound, "expert_ids_ptr")
    of_blocks = slots[: int(content(bound, "num_tokens_post_padded_ptr"))].reshape(-1, BLOCK)
    owner = {int(slot): int(experts[i]) for i, block in enumerate(of_blocks) for slot in block if slot < SLOTS}
    assert sorted(owner) == list(range(SLOTS))
    assert all(len({owner[row * top_k + choice] for choice in range(top_k)}) == top_k for row in range(rows))


def test_sglang_counts_one_expert_more_than_there_are() -> None:
    written = {"sorted_token_ids": ints(64), "experts_ids": ints(16), "num_tokens_post_pad": ints(1)}
    sizes = {"num_experts": EXPERTS + 1, "block_size": BLOCK, "pad_sorted_token_ids": True}
    arguments = {"topk_ids": ints(50, TOP_K), **sizes, **written, "cumsum_buffer": ints(EXPERTS + 2)}
    bound = prepared("sgl_kernel::moe_align_block_size", {}, **arguments)
    assert set(content(bound, "topk_ids").flatten().tolist()) <= set(range(EXPERTS))
    assert all(not content(bound, name).any() for name in (*written, "cumsum_buffer"))


def test_experts_are_drawn_as_often_as_a_sampled_batch_chose_them() -> None:
    bound = BoundCall("triton::fused_moe_kernel", [], routing={EXPERTS: torch.tensor([0, 90, 0, 90, 0, 0, 90, 0])})
    assert set(drawn_experts(bound, 50, TOP_K, EXPERTS).flatten().tolist()) == {1, 3, 6}
    assert len(set(drawn_experts(bound, 50, 5, EXPERTS)[0].tolist())) == 5, "others where those are too few"
    assert len(set(drawn_experts(bound, 50, TOP_K, EXPERTS + 1).flatten().tolist())) > 3, "of another layer's experts"


def test_without_slots_each_row_has_an_expert() -> None:
    bound = fused(sorted_token_ids_ptr=None, expert_ids_ptr=ints(SLOTS))
    assert bool((content(bound, "expert_ids_ptr") < EXPERTS).all())
    assert int(content(bound, "num_tokens_post_padded_ptr")) == SLOTS * BLOCK


def test_recorded_experts_stay() -> None:
    kept = torch.zeros(12, dtype=torch.int64)
    bound = BoundCall(
        "triton::fused_moe_kernel", [Argument(name="expert_ids_ptr", value=ints(12))], contents={"0": kept}
    )
    replay_rule_for(bound.operator).prepare(bound)
    assert content(bound, "expert_ids_ptr") is kept


def test_experts_of_which_a_sample_lacks_the_rows_are_drawn_with_them() -> None:
    bound = fused({"expert_ids_ptr": torch.full((12,), EXPERTS - 1)})
    assert len(set(content(bound, "expert_ids_ptr").tolist())) > 1
    assert sorted(content(bound, "sorted_token_ids_ptr").unique().tolist())[:SLOTS] == list(range(SLOTS))


def test_how_often_experts_were_chosen_is_told_by_the_blocks_in_use() -> None:
    slots = torch.arange(4 * BLOCK) % SLOTS
    tables = {"expert_ids_ptr": torch.tensor([1, 3, 3, 5]), "sorted_token_ids_ptr": slots}
    bound = fused({**tables, "num_tokens_post_padded_ptr": torch.tensor([3 * BLOCK])})
    rule = replay_rule_for(bound.operator)
    chosen = rule.chosen_experts(bound)
    assert chosen is not None and chosen.tolist() == [0, BLOCK, 0, 2 * BLOCK, 0, 0, 0, 0]


def test_without_an_output_nothing_says_how_many_experts_a_token_has() -> None:
    with pytest.raises(Skip, match="no output that says how many"):
        fused(c_ptr=None)


def test_the_blocks_of_triton_kernels_cover_the_rows_of_each_expert() -> None:
    arguments: dict[str, Value] = {
        "YPtr": floats(1, SLOTS, 32), "ExptHist": ints(EXPERTS), "ExptOffs": ints(EXPERTS + 1), "ExptOffsSum": ints(),
        "ExptData": ints(12), "GatherIndx": ints(SLOTS), "ScatterSrcIndx": None,
    }  # fmt: skip
    bound = prepared("triton::_matmul_ogs", {"N_EXPTS_ACT": TOP_K, "BLOCK_M": BLOCK}, **arguments)
    counts, starts, data = (content(bound, name) for name in ("ExptHist", "ExptOffs", "ExptData"))
    assert int(starts[-1]) == SLOTS and torch.equal(starts.diff(), counts)
    blocks = [(int(word) & 0xFFFF, int(word) >> 16) for word in data if word >= 0]
    assert len(blocks) == int(content(bound, "ExptOffsSum"))
    rows = sorted(
        int(starts[expert]) + number * BLOCK + row
        for expert, number in blocks
        for row in range(min(BLOCK, int(counts[expert]) - number * BLOCK))
    )
    assert rows == list(range(SLOTS))
    assert sorted(content(bound, "GatherIndx").tolist()) == list(range(SLOTS))


def test_rows_that_are_added_up_are_rows_of_the_products() -> None:
    bound = prepared("triton::_reduce_grouped", {}, X=floats(1, 1, SLOTS, 32), InIndx=ints(TOKENS, TOP_K))
    assert sorted(content(bound, "InIndx").flatten().tolist()) == list(range(SLOTS))


def by_expert(bound: BoundCall, counts: str, starts: str, data: str) -> list[int]:
    """The rows that the blocks of a product cover, sorted."""
    sizes, first, words = (content(bound, name).tolist() for name in (counts, starts, data))
    blocks = [(word & 0xFFFF, word >> 16) for word in words if word >= 0]
    return sorted(first[e] + n * BLOCK + row for e, n in blocks for row in range(min(BLOCK, sizes[e] - n * BLOCK)))


NEWER = {
    "triton::_matmul_ogs": ("ExptHist", "ExptOffs", "ExptTileOffs", "ExptData"),
    "triton::_matmul": ("XSliceSizes", "XSliceOffs", "XBlockOffs", "XBlockSchedule"),
}


def product(
    operator: str, gathers: bool, recorded: dict[str, torch.Tensor] | None = None, before: tuple[int, ...] = (1,)
) -> BoundCall:
    """Of the newer package, which does not say how many experts a token has; `before`: dimensions before the rows."""
    names, lengths = NEWER[operator], (EXPERTS, EXPERTS + 1, EXPERTS + 1, 12)
    arguments: dict[str, Value] = {name: ints(length) for name, length in zip(names, lengths, strict=True)}
    arguments |= {"XPtr": floats(*before, TOKENS if gathers else SLOTS, 16), "YPtr": floats(*before, SLOTS, 32)}
    arguments |= {"GatherIndx": ints(SLOTS), "GatherDstIndx": ints(SLOTS)} if gathers else {}
    arguments |= {} if gathers else {"ScatterSrcIndx": ints(SLOTS), "WriteBackIndx": ints(SLOTS)}
    args = [Argument(name=name, value=value) for name, value in arguments.items()]
    bound = BoundCall(operator, args, constants={"BLOCK_M": BLOCK})
    for name, values in (recorded or {}).items():
        bound.set_content(name, values)
    replay_rule_for(operator).prepare(bound)
    assert all(path in bound.contents for path, _ in bound.integers())
    return bound


@pytest.mark.parametrize("operator", NEWER)
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("before", [(1,), ()])
def test_newer_products_gather_tokens_and_scatter_rows(operator: str, gathers: bool, before: tuple[int, ...]) -> None:
    bound, (counts, starts, block_starts, data) = product(operator, gathers, before=before), NEWER[operator]
    assert by_expert(bound, counts, starts, data) == list(range(SLOTS))
    blocks = -(-content(bound, counts) // BLOCK)
    assert content(bound, block_starts).tolist() == [0, *blocks.cumsum(0).tolist()]
    if gathers:
        tokens = content(bound, "GatherIndx").tolist()
        assert sorted(tokens) == [slot // TOP_K for slot in range(SLOTS)]
        ends = content(bound, starts).tolist()
        assert all(len(set(tokens[a:b])) == b - a for a, b in pairwise(ends)), "a token twice"
    else:
        assert sorted(content(bound, "WriteBackIndx").tolist()) == list(range(SLOTS))


def test_recorded_rows_of_experts_stay_and_their_blocks_follow() -> None:
    counts = torch.tensor([9, 0, 0, 6, 0, 0, 0, 0])
    recorded = {"ExptHist": counts, "ExptOffs": torch.nn.functional.pad(counts.cumsum(0), (1, 0))}
    recorded |= {"GatherIndx": torch.arange(SLOTS) // TOP_K, "ExptData": torch.full((12,), 7)}
    bound = product("triton::_matmul_ogs", True, recorded)
    assert all(content(bound, name) is values for name, values in recorded.items())
    assert content(bound, "ExptTileOffs").tolist() == [0, 3, 3, 3, 5, 5, 5, 5, 5]
    assert replay_rule_for("triton::_matmul_ogs").chosen_experts(bound) is counts


@pytest.mark.parametrize("recorded", [False, True])
def test_each_slot_is_sorted_to_a_row_of_its_own(recorded: bool) -> None:
    """As the kernel places them, of which one has no expert where they were recorded."""
    tokens, shapes = 70, {"ColPartialSum": ints(3, 32), "ColOffs": ints(EXPERTS)}
    shapes |= {
        "NonzeroIndx": TensorSpec((tokens, TOP_K), "int16"),
        "ColSortedIndx": ints(210),
        "RowSortedIndx": ints(210),
    }
    args = [Argument(name=name, value=value) for name, value in shapes.items()]
    operator = "triton::_bitmatrix_metadata_compute_stage2"
    bound = BoundCall(operator, args, constants={"BLOCK_PER_TOK": 32})
    if recorded:
        ids = torch.rand(tokens, EXPERTS).argsort(-1)[:, :TOP_K]
        ids[3, 1] = -1
        bound.set_content("NonzeroIndx", ids.to(torch.int16))
    replay_rule_for(operator).prepare(bound)
    partial, starts = content(bound, "ColPartialSum"), content(bound, "ColOffs")
    places, seen = [], torch.zeros(EXPERTS, dtype=torch.int64)
    for token, chosen in enumerate(content(bound, "NonzeroIndx").tolist()):
        seen = seen if token % 32 else torch.zeros_like(seen)
        for expert in chosen:
            if expert >= 0:
                places.append(int(partial[token // 32, expert] + starts[expert] + seen[expert]))
                seen[expert] += 1
    assert sorted(places) == list(range(tokens * TOP_K - recorded))
    assert all(path in bound.contents for path, _ in bound.integers())


RAGGED = {"first_block_size_log2": 4, "SIZES": 4, "BLOCK": 512}


def ragged(
    name: str, counts: list[int] | None, width: int = 20, written: int | None = None, **more: Value
) -> BoundCall:
    tables = {"SliceSizes": ints(EXPERTS), "BlockSchedule": TensorSpec((4, width), "int32", (512, 1), storage=2)}
    tables["BlockOffs"] = TensorSpec((5 if more else 4, EXPERTS + 1), "int32", (512, 1), storage=1)
    args = [Argument(name=name, value=value) for name, value in {**tables, **RAGGED, **more}.items()]
    bound = BoundCall(f"triton::_ragged_tensor_metadata_{name}", args)
    if counts:
        bound.set_content("SliceSizes", torch.tensor(counts))
    for table in ("BlockSchedule", "BlockOffs") if written is not None else ():
        bound.set_content(table, torch.full(bound.spec(table).shape, written))
    replay_rule_for(bound.operator).prepare(bound)
    return bound


@pytest.mark.parametrize("counts", [None, [0, 100, 30, 7, 0, 0, 1, 0]])
@pytest.mark.parametrize("width", [5, 8, 20])
def test_blocks_of_rows_have_room_in_their_schedule(counts: list[int] | None, width: int) -> None:
    if counts and width < 20:
        with pytest.raises(Skip, match="more blocks than the"):
            ragged("compute", counts, width)
        return
    bound = ragged("compute", counts, width)
    starts = content(bound, "BlockOffs")
    for i in range(4):
        blocks = -(-content(bound, "SliceSizes") // (16 << i))
        assert starts[i].tolist() == [0, *blocks.cumsum(0).tolist()] and int(blocks.sum()) <= width


def test_what_a_graph_left_in_its_tables_is_not_what_they_began_with() -> None:
    counts = [0, 100, 30, 7, 0, 0, 1, 0]
    for left in (5, None):
        bound = ragged("compute", counts, written=left)
        assert not content(bound, "BlockSchedule").any() and content(bound, "BlockOffs")[0].tolist()[-1] == 11
    bound = ragged("memset", counts, written=5, n_slices=EXPERTS)
    assert not content(bound, "BlockSchedule").any() and not content(bound, "BlockOffs").any()


def test_tables_are_as_wide_as_the_rows_that_are_filled() -> None:
    """A kernel that fills rows of 512 is not given the beginning of a row alone."""
    bound = ragged("memset", None, n_slices=EXPERTS)
    assert bound.spec("BlockOffs").shape == (5, 512) and bound.spec("BlockSchedule").shape == (4, 512)
    with pytest.raises(Skip, match="'BlockSchedule' ends before what it fills"):
        ragged("memset", None, width=600, n_slices=EXPERTS)


def combined(blocks: int, width: int = 20) -> BoundCall:
    """The launch that fills so many blocks of 512 of the schedule, among others, as vLLM's package has it."""
    schedule = TensorSpec((4, width), "int32", (512, 1), storage=1)
    tables = {"ExpertHist": ints(EXPERTS), "PartialHist": ints(3, 32), "MDStarts": ints(5, 512), "Indx": ints(30)}
    sizes = {"SIZES": 4, "BLOCK_A": 512}
    return prepared("triton::_combined_routing_memset", sizes, MDTileInfo=schedule, blocks1a=5 + blocks, **tables)


def test_counts_of_the_older_package_add_up_and_its_schedule_is_filled_whole() -> None:
    bound = combined(4)
    counts = content(bound, "ExpertHist")
    assert counts.any() and counts.tolist() == content(bound, "PartialHist").sum(0)[:EXPERTS].tolist()
    assert bound.spec("MDTileInfo").shape == (4, 512) and not content(bound, "MDTileInfo").any()
    with pytest.raises(Skip, match="'MDTileInfo' ends before what it fills"):
        combined(5)


@pytest.mark.parametrize(("name", "blocks"), [("Out", "OutPartials"), ("Ret", "Partials")])
def test_counts_of_experts_are_added_to_whole_words_of_them(name: str, blocks: str) -> None:
    arguments: dict[str, Value] = {"B": TensorSpec((TOKENS, 2), "uint32"), name: ints(40), blocks: ints(4, 64)}
    bound = prepared("triton::_sum_bitmatrix_rows", {}, **arguments)
    assert bound.spec(name).shape == (64,) and not content(bound, name).any()
    assert replay_rule_for("triton::_sum_bitmatrix_rows").added_to == ("Out",)


def test_counts_of_blocks_add_up_to_those_of_all() -> None:
    arguments: dict[str, Value] = {"PartialColSum": ints(3, 32), "ColSum": ints(EXPERTS), "ColOffs": ints(EXPERTS)}
    bound = prepared("triton::_bitmatrix_metadata_compute_stage1", {}, **arguments, CombinedIndx=ints(30))
    assert content(bound, "ColSum").tolist() == content(bound, "PartialColSum").sum(0)[:EXPERTS].tolist()
    assert all(path in bound.contents for path, _ in bound.integers())


def test_what_is_written_for_each_rank_is_found_in_its_list() -> None:
    ids, bits = TensorSpec((TOKENS, TOP_K), "int16"), TensorSpec((TOKENS, 1), "uint32")
    bound = prepared("triton::_topk_forward", {}, X=floats(TOKENS, 32), PeerYis=[ids], PeerBits=[bits])
    assert bound.contents.keys() == {"1.0", "2.0"}

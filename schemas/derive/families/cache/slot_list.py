"""slot_list and kv_splits: what SGLang's Triton attention reads of its sequences, made once for all layers.

slot_list looks the slots of each sequence's tokens up in the table of all requests, from its first one or from a later
one on (sliding windows, speculated tokens). kv_splits decides in how many parts the keys of each sequence are in a
decode (`attention_split`), by the lengths and by how many multiprocessors there are. Read in SGLang 0.5.15 and 0.5.23.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.attention.pages import starts_of
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, dtype_name, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.descriptions import BEFORE

LIST = """import torch


@torch.no_grad()
def run({inputs}):
    slots_out = slots.clone()
    for b in range(req_pool_indices.shape[0]):
        start, length = {start}, int(lengths[b])
        row = req_to_token[int(req_pool_indices[b])]
        slots_out[int(kv_indptr[b]) : int(kv_indptr[b]) + length] = {listed}
    return slots_out
"""
LISTED = "row[start : start + length]"
MAPPED = f"torch.where({LISTED} < 0, -1, mapping[{LISTED}.clamp(min=0).long()])"
TABLE = ("max_num_reqs", "max_context")


@family("slot_list", "triton::create_flashinfer_kv_indices_triton")
def slot_list(call: Invocation) -> KernelInstance:
    """`req_to_token_ptr`: [requests, tokens]; `req_pool_indices_ptr`, lengths: [sequences]; `kv_indptr`: [sequences +
    1] or longer; `kv_indices_ptr`: the slots, one after the other; `token_mapping`: [slots], what each is listed as."""
    table, slots = call.tensor("req_to_token_ptr"), call.tensor("kv_indices_ptr")
    lengths, requests = call.tensor("page_kernel_lens_ptr"), call.tensor("req_pool_indices_ptr")
    first, mapping = call.optional("kv_start_idx"), call.optional("token_mapping")
    batch = min(len(lengths), len(requests), len(call.tensor("kv_indptr")) - 1)
    starts, lengths = call.tensor("kv_indptr")[: batch + 1], lengths[:batch]
    if (
        table.dim() != 2
        or call["req_to_token_ptr_stride"] != table.stride(0)
        or call["ENTRY_PAGE_SIZE"] not in (None, 1)
    ):
        raise Unrecognized("no list of one table's slots")
    inputs = {
        "req_to_token": tensor_arg(table, *TABLE, description="The slot of each token of each request."),
        "req_pool_indices": tensor_arg(requests[:batch], "batch_size", description="The row of each request."),
        "kv_indptr": tensor_arg(starts, "len_indptr", description="Where each sequence's slots begin."),
        "lengths": tensor_arg(lengths, "batch_size", description="How many slots are listed of each."),
        "slots": tensor_arg(slots, "num_kv_indices", description=BEFORE),
    }
    if first is not None:
        inputs["first"] = tensor_arg(first[:batch], "batch_size", description="The first token that is listed.")
    if mapping is not None:
        inputs["mapping"] = tensor_arg(mapping, "num_slots", description="The slot of another cache for each slot.")
    return KernelInstance(
        name=f"slot_list{'' if first is None else '_from'}{'' if mapping is None else '_mapped'}",
        op_type="slot_list",
        axes=dict.fromkeys((*TABLE, "batch_size", "len_indptr", "num_kv_indices"))
        | ({} if mapping is None else {"num_slots": None}),
        inputs=inputs,
        outputs={"slots_out": lazy_arg(slots.dtype, ("num_kv_indices",), lambda: slots)},
        reference=LIST.format(
            inputs=", ".join(inputs),
            start="0" if first is None else "int(first[b])",
            listed=LISTED if mapping is None else MAPPED,
        ),
        description="The slots of each sequence's tokens, one after the other.",
        constraints=("len_indptr == batch_size + 1",),
        touched=lambda: (
            int(require_values(lengths, "sequence lengths").sum())
            * sum(tensor.element_size() for tensor in (table, slots, mapping) if tensor is not None)
        ),
    )


@cost_function("slot_list")
def slot_list_cost(inputs: CostInputs) -> Cost:
    """Slots are read and written once, and so is what they are mapped to."""
    count = int(inputs.index("lengths").sum())
    read = count * sum(inputs[name].element_size() for name in ("req_to_token", "mapping") if name in inputs)
    return Cost(read + count * inputs["slots"].element_size(), read, 0, inputs.dtype)


LISTS = ("slot_list",)


@valid_input("req_to_token", op_types=LISTS)
def any_slots(draft: WorkloadDraft, name: str) -> torch.Tensor:
    shape = draft.shape(name)
    return draft.integers(0, draft.size("num_slots") or shape[0] * shape[1], shape)


@valid_input("mapping", op_types=LISTS)
def other_slots(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.integers(0, draft.shape(name)[0], draft.shape(name))


@valid_input("req_pool_indices", op_types=LISTS)
def requests_of_table(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.integers(0, draft.shape("req_to_token")[0], draft.shape(name))


@valid_input("kv_indptr", op_types=LISTS)
def list_offsets(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Of sequences that the table has room for."""
    slots, sequences = draft.size("num_kv_indices") or 0, draft.shape(name)[0] - 1
    most = torch.full((sequences,), draft.shape("req_to_token")[1])
    return starts_of(draft.parts(min(slots, int(most.sum())), torch.zeros_like(most), most))


@valid_input("lengths", op_types=LISTS)
def listed_lengths(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft["kv_indptr"].diff()


@valid_input("first", op_types=LISTS)
def first_listed(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """So that the table has all tokens that are listed."""
    spare = draft.shape("req_to_token")[1] - draft["lengths"].long()
    return (draft.reals(0.0, 1.0, spare.shape) * (spare + 1)).long().minimum(spare)


@replay_rule("triton::create_flashinfer_kv_indices_triton")
class SlotList(ReplayRule):
    """Copied out of tables of all requests and of all slots, which are too large for a Sample."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "req_to_token_ptr", "token_mapping")


SPLITS = """import torch


@torch.no_grad()
def run(seq_lens):
    longest, shortest = int(seq_lens.max()), int(seq_lens.min())
    shortest = longest if longest * 8 < shortest * 10 else shortest
    by_lengths = max(min(-(-longest // max(shortest, 1)), {most}), 1)
    doublings = torch.log2(torch.tensor(longest / 64.0)).clamp(min=1.0)
    by_processors = min(-(-int({processors} * doublings) // (len(seq_lens) * {blocks})), {most})
    splits = [-(-seq_lens // max(-(-longest // count), 1)) for count in (by_lengths, by_processors)]
    return torch.maximum(*splits).to(torch.{dtype}){uneven}
"""
UNEVEN = ", torch.tensor([shortest < longest], dtype=torch.int32, device=seq_lens.device)"


@family("kv_splits", "triton::get_num_kv_splits_triton")
def kv_splits(call: Invocation) -> KernelInstance:
    """`seq_lens_ptr`, `num_kv_splits_ptr`: of each sequence its length and its parts; both may be longer."""
    sequences, heads, kv = (int(call.number(name)) for name in ("num_seq", "num_head", "num_kv_head"))
    lengths, splits = call.tensor("seq_lens_ptr"), call.tensor("num_kv_splits_ptr")
    if call.number("num_group") != 1 or min(len(lengths), len(splits)) < sequences:
        raise Unrecognized("sequences have several queries")
    group = heads // kv
    blocks = heads if group == 1 else -(-heads // min(16, group))  # of one sequence
    most, processors = int(call.number("max_kv_splits")), int(call.number("device_core_count"))
    outputs = {"num_kv_splits": lazy_arg(splits.dtype, ("batch_size",), lambda: splits[:sequences])}
    if (uneven := call.optional("uneven_batch_ptr")) is not None:
        text = "1 where the longest has at least a fourth more keys than the shortest."
        outputs["uneven"] = lazy_arg("int32", ("num_flags",), lambda: uneven[:1].to(torch.int32), text)
    return KernelInstance(
        name=f"kv_splits{'' if uneven is None else '_uneven'}_h{heads}_kv{kv}_s{most}_sm{processors}",
        op_type="kv_splits",
        axes={"batch_size": None} | ({} if uneven is None else {"num_flags": 1}),
        inputs={"seq_lens": tensor_arg(lengths[:sequences], "batch_size", description="The length of each sequence.")},
        outputs=outputs,
        reference=SPLITS.format(
            most=most,
            processors=processors,
            blocks=blocks,
            dtype=dtype_name(splits.dtype),
            uneven="" if uneven is None else UNEVEN,
        ),
        description=f"In how many parts the keys of each sequence are, on {processors} multiprocessors.",
        touched=lambda: total_bytes(lengths[:sequences], splits[:sequences]),
    )


cost_function("kv_splits")(CostInputs.whole)


@valid_input("seq_lens", op_types=("kv_splits",))
def some_lengths(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Up to some thousand keys, at least one."""
    return draft.integers(1, 4097, draft.shape(name))

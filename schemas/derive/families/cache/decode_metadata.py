"""decode_metadata: what attention of a decode reads of its sequences, by SGLang's Triton kernel for FlashAttention.

Lengths, where each sequence's keys begin, and the pages that it has, looked up in the table of all requests' slots. Of
models with sliding windows a second table, whose slots are others. Pages behind a sequence's last one stay as they are,
or become 0. Where pages have other numbers in memory (`full_v2p`, `swa_v2p`), the kernel is declined.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import bytes_without_unread_rows, cut_to_rows_in_use, set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.descriptions import FOR_ITS_LENGTH
from kcap.schemas.recording.values import TensorSpec

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    lengths = (seq_lens + {delta}).to(torch.int32)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
{tables}    return lengths, starts{outputs}
"""
TABLE = """    columns = torch.arange({pages}, device=seq_lens.device)
    live = columns < ((lengths + {last}) // {page_size})[:, None]
    places = (columns * {page_size}).clamp(max=req_to_token.shape[1] - 1)
    slots = torch.where(live, req_to_token[req_pool_indices.to(torch.int64)[:, None], places], 0)
{copy}"""
COPY = """    {table}_out = {table}.clone(memory_format=torch.contiguous_format)
    rows = {table}_out[: len(lengths), :{pages}]
    rows.copy_(torch.where(live, {slots} // {page_size}, {rest}))
"""
TABLES = {"page_table": "slots", "swa_page_table": "swa_slots[slots.to(torch.int64)]"}


@family("decode_metadata", "triton::_fused_decode_metadata_kernel")
def decode_metadata(call: Invocation) -> KernelInstance:
    """`seq_lens`, `req_pool_indices`: [batch_size], of each request its length and its row of `req_to_token`, which is
    [max_num_reqs, max_context]. Of `page_table`, [num_rows, max_num_pages], `max_seq_pages` columns may be written.
    """
    call.refuse("full_v2p", "swa_v2p")
    batch, pages = int(call.number("B")), 0 if call["SKIP_PAGE_TABLE"] else int(call.number("max_seq_pages"))
    page_size, delta = int(call.number("PAGE_SIZE")), int(call.number("SEQ_LEN_DELTA"))
    lengths, starts, seq_lens = (call.tensor(n) for n in ("cache_seqlens_int32", "cu_seqlens_k", "seq_lens"))
    written = {name: call.tensor(name) for name in TABLES if pages and call[name] is not None}
    if {lengths.dtype, starts.dtype, *(table.dtype for table in written.values())} != {torch.int32}:
        raise Unrecognized("outputs of another kind")
    axes: dict[str, int | None] = {"batch_size": None, "len_indptr": None, "page_size": page_size}
    inputs = {"seq_lens": tensor_arg(seq_lens[:batch], "batch_size", description="Length of each sequence.")}
    if written:
        requests, table = call.tensor("req_pool_indices"), call.tensor("req_to_token")
        axes |= dict.fromkeys(("max_num_reqs", "max_context", "num_rows", "max_num_pages"))
        inputs["req_to_token"] = tensor_arg(
            table, "max_num_reqs", "max_context", description="The slot of each token of each request."
        )
        inputs["req_pool_indices"] = tensor_arg(
            requests[:batch], "batch_size", description="The row of each sequence's request."
        )
    if "swa_page_table" in written:
        axes["num_slots"] = None
        slots = call.tensor("full_to_swa_index_mapping")
        inputs["swa_slots"] = tensor_arg(slots, "num_slots", description="The slot in the other cache of each slot.")
    inputs["cu_seqlens_k"] = tensor_arg(starts[: batch + 1], "len_indptr", description=FOR_ITS_LENGTH)
    for name, tensor in written.items():
        inputs[name] = tensor_arg(tensor, "num_rows", "max_num_pages", description="Pages of each sequence.")
    outputs = {
        "cache_seqlens": lazy_arg("int32", ("batch_size",), lambda: lengths[:batch], "Lengths with what is added."),
        "cu_seqlens_k_out": lazy_arg(
            "int32", ("len_indptr",), lambda: starts[: batch + 1], "Where each one's keys begin."
        ),
    }
    for name, tensor in written.items():
        outputs[f"{name}_out"] = lazy_arg("int32", ("num_rows", "max_num_pages"), value_of(tensor))
    word = "".join(
        (
            f"_delta{delta}" if delta else "",
            "_swa" if "swa_page_table" in written else "",
            "_zeroed" if written and call["ZERO_TAIL"] else "",
            f"_p{pages}_ps{page_size}" if written else "",
        )
    )
    return KernelInstance(
        name=f"decode_metadata{word}",
        op_type="decode_metadata",
        axes=axes if written else {name: None for name in axes if name != "page_size"},
        inputs=inputs,
        outputs=outputs,
        reference=reference(list(inputs), list(written), delta, pages, page_size, bool(call["ZERO_TAIL"])),
        description="Lengths, offsets and pages of the sequences of a decode.",
        constraints=("len_indptr == batch_size + 1",),
        touched=lambda: total_bytes(seq_lens[:batch], lengths[:batch], starts[: batch + 1]),  # and some pages
    )


def value_of(tensor: torch.Tensor) -> LazyValue:
    return lambda: tensor


def reference(inputs: list[str], tables: list[str], delta: int, pages: int, page_size: int, zeroed: bool) -> str:
    copies = [
        COPY.format(table=name, pages=pages, slots=TABLES[name], page_size=page_size, rest="0" if zeroed else "rows")
        for name in tables
    ]
    table = TABLE.format(pages=pages, page_size=page_size, last=page_size - 1, copy="".join(copies))
    return REFERENCE.format(
        inputs=", ".join(inputs),
        delta=delta,
        tables=table if tables else "",
        outputs="".join(f", {name}_out" for name in tables),
    )


@cost_function("decode_metadata")
def decode_metadata_cost(inputs: CostInputs) -> Cost:
    """Of the tables, entries of some pages."""
    read, lengths = inputs.read("seq_lens"), 4 * inputs["seq_lens"].numel()
    return Cost(read + 2 * lengths + 4, read, 0, inputs.dtype)


@valid_input("req_pool_indices", op_types=("decode_metadata",))
def rows_of_requests(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.distinct(draft.shape(name)[0], draft.shape("req_to_token")[0])


@valid_input("req_to_token", "swa_slots", op_types=("decode_metadata",))
def slots_of_tokens(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Any slot, but of those by which another is looked up."""
    shape = draft.shape("req_to_token")
    return draft.integers(0, draft.size("num_slots") or shape[0] * shape[1], draft.shape(name))


@replay_rule(
    "triton::_fused_decode_metadata_kernel",
    *("triton::_fused_metadata_kernel_ps1_no_swa", "triton::_fused_metadata_kernel_general"),
)
class DecodeMetadata(ReplayRule):
    """Slots are only looked up and written down, so that any will do: no Sample holds the table of all requests.

    0.5.15 has two kernels for it, which copy what is behind a sequence's last page, too: they have no Definition.
    """

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "cache_seqlens_int32", "cu_seqlens_k", "page_table", "swa_page_table")
        for name in ("req_to_token", "full_to_swa_index_mapping", "full_to_swa_mapping", "full_v2p", "swa_v2p"):
            spec = bound[name]
            if isinstance(spec, TensorSpec) and bound.content(name) is None:
                bound.set_content(name, torch.zeros([1] * len(spec.shape), dtype=torch.int64))  # and zeros elsewhere

    def trim_tables(self, bound: BoundCall) -> None:
        cut_to_rows_in_use(bound, "req_to_token", "req_pool_indices")

    def touched(self, bound: BoundCall, total: int) -> int:
        table, requests = bound.spec("req_to_token"), bound.spec("req_pool_indices")
        return bytes_without_unread_rows(total, table, requests.numel, 0)

"""cache_gather: the rows of sequences, or of a part of each, gathered from a paged cache into a workspace.

vLLM's operators, with which latent attention reads what is cached of a long prompt part by part (read in vLLM 0.22.1,
csrc/cache_kernels.cu). Those that convert quantized rows are declined.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.attention.pages import starts_of
from kcap.schemas.derive.index_arguments import renumber_densely, shrink_caches, table_in_use
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, require_values
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.descriptions import BEFORE
from kcap.schemas.recording.values import TensorSpec

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert src_cache.shape[1:] == ({ps}, {d})
    out = workspace.clone(memory_format=torch.contiguous_format)
    for row in range(cu_seq_lens.shape[0] - 1):
        start, end = int(cu_seq_lens[row]), int(cu_seq_lens[row + 1])
        position = torch.arange(end - start, device=out.device){first}
        pages = block_table[row, position // {ps}].long()
        out[start:end] = src_cache[pages, position % {ps}]
    return out
"""

TABLE = ("batch_size", "max_num_pages")
ROWS = ("num_rows", "head_dim_kv")
AXES = dict.fromkeys(("num_pages", "num_rows", "len_indptr", *TABLE))


@family("cache_gather", "_C_cache_ops::gather_and_maybe_dequant_cache", "_C_cache_ops::cp_gather_cache")
def gather(call: Invocation) -> KernelInstance:
    """`src_cache`: [pages, rows of a page, dim], `dst`: [rows, dim]; the rows that no sequence fills stay."""
    cache, workspace, starts = call.tensor("src_cache"), call.tensor("dst"), call.tensor("cu_seq_lens")
    first, sequences = call.optional("seq_starts"), len(starts) - 1
    if cache.dim() != 3 or workspace.dim() != 2 or workspace.dtype != cache.dtype or cache.dtype not in FLOATS:
        raise Unrecognized("its cache is quantized, or has several heads")
    if call["batch_size"] not in (None, sequences):
        raise Unrecognized("not all of its sequences are gathered")
    page_size, d = cache.shape[1:]
    inputs = {
        "src_cache": tensor_arg(cache, "num_pages", "page_size", "head_dim_kv"),
        "workspace": tensor_arg(workspace, *ROWS, description=BEFORE),
        "block_table": tensor_arg(call.tensor("block_table")[:sequences], *TABLE),
        "cu_seq_lens": tensor_arg(starts, "len_indptr", description="Where each sequence's rows begin."),
    }
    if first is not None:
        text = "The first token of each sequence that is gathered."
        inputs["seq_starts"] = tensor_arg(first[:sequences], "batch_size", description=text)
    row = 2 * d * cache.element_size()
    words = ("" if first is None else "_part") + abbreviate(cache.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"cache_gather{words}_d{d}_ps{page_size}",
        op_type="cache_gather",
        axes={**AXES, "page_size": page_size, "head_dim_kv": d},
        inputs=inputs,
        outputs={"workspace_out": lazy_arg(cache.dtype, ROWS, lambda: call.tensor("dst"))},
        reference=REFERENCE.format(
            inputs=", ".join(inputs), ps=page_size, d=d, first="" if first is None else " + seq_starts[row]"
        ),
        description="Rows of sequences, gathered from a paged cache.",
        constraints=("len_indptr == batch_size + 1",),
        touched=lambda: int(require_values(starts, "sequence starts")[-1]) * row,
    )


@cost_function("cache_gather")
def gather_cost(inputs: CostInputs) -> Cost:
    """The workspace may be written in place."""
    row = inputs["src_cache"].shape[2] * inputs["src_cache"].element_size()
    read = int(inputs.index("cu_seq_lens")[-1]) * row
    return Cost(2 * read, read, 0, inputs.dtype)


@valid_input("cu_seq_lens", op_types=("cache_gather",))
def gathered_rows(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """As many rows in all as the workspace, and of each sequence as the pages of its table, have room for."""
    sequences, pages = draft.shape("block_table")
    most = torch.full((sequences,), pages * (draft.size("page_size") or 1))
    return starts_of(draft.parts(draft.shape("workspace")[0], torch.zeros_like(most), most))


@valid_input("seq_starts", op_types=("cache_gather",))
def first_rows(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Of some page, from which on the table has as many rows as are gathered."""
    size, pages = draft.size("page_size") or 1, draft.shape("block_table")[1]
    spare = pages - (draft["cu_seq_lens"].diff().long() + size - 1) // size
    return (draft.reals(0.0, 1.0, spare.shape) * (spare + 1)).long().minimum(spare) * size


@replay_rule("_C_cache_ops::gather_and_maybe_dequant_cache", "_C_cache_ops::cp_gather_cache")
class GatherRule(ReplayRule):
    """The table is cut to the pages in use; which sequence a row is of follows from where each begins."""

    idempotent_writes = ("dst",)

    def prepare(self, bound: BoundCall) -> None:
        starts, table, first = (bound.content(name) for name in ("cu_seq_lens", "block_table", "seq_starts"))
        if starts is None or table is None or (first is None and isinstance(bound["seq_starts"], TensorSpec)):
            raise Skip("no Sample holds its block table and where its sequences begin")
        counts = starts.long().diff()
        ends = counts + (first.long()[: len(counts)] if first is not None else 0)
        dense, pages = renumber_densely(table_in_use(table, ends, bound.spec("src_cache").shape[1]))
        bound.set_content("block_table", dense)
        shrink_caches(bound, ("src_cache",), pages)
        if isinstance(bound["token_to_seq"], TensorSpec):
            sequence_of_row = torch.arange(len(counts)).repeat_interleave(counts)
            rows = bound.spec("token_to_seq").shape[0]
            bound.set_content("token_to_seq", torch.nn.functional.pad(sequence_of_row, (0, rows))[:rows])

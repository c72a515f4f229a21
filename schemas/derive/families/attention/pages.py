"""A batch over a paged cache: FlashInfer's index inputs, computed from an operator's own.

FlashInfer names pages by `kv_indptr` (where each sequence's begin), `kv_indices` and `kv_last_page_len`; vLLM's and
SGLang's kernels take a table [sequences, pages] and the sequences' lengths. A batch with one query a sequence is a
decode, any other a prefill (mixed batches too). A CUDA graph's batch ends with rows of padding. A PageTable is of a
Definition that takes the table itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.families.attention.core import MakeTensor, first_key_seen
from kcap.schemas.derive.invocation import Unrecognized, require_values
from kcap.schemas.derive.kernel import OperatorFacts, TensorArg, lazy_arg


@dataclass(frozen=True)
class Pages:
    """The pages of each sequence in FlashInfer's form; each function may raise Unrecognized."""

    indptr: MakeTensor
    indices: MakeTensor
    last: MakeTensor
    page_size: int

    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence: int64 [sequences]."""
        before = (self.indptr().diff().long() - 1).clamp(min=0)
        return before * self.page_size + self.last()

    def rows(self, queries: torch.Tensor, window: int = -1) -> int:
        """Rows of the cache that `queries` [sequences] see; of a page that sequences share, the longest part."""
        lengths, starts = self.lengths(), self.indptr().long()
        counts = starts.diff()
        page = torch.arange(int(counts.sum()), device=starts.device)
        page = (page - (starts[:-1] - starts[0]).repeat_interleave(counts)) * self.page_size
        begin = first_key_seen(lengths, queries, window).repeat_interleave(counts)
        seen = torch.minimum(lengths.repeat_interleave(counts), page + self.page_size) - torch.maximum(begin, page)
        distinct, page_index = self.indices().unique(return_inverse=True)
        longest = torch.zeros(len(distinct), dtype=torch.int64, device=seen.device)
        return int(longest.scatter_reduce(0, page_index, seen.clamp(min=0), "amax").sum())


def table_pages(table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> Pages:
    """The same pages from a table [sequences or more, pages or more] and `lengths` [sequences]."""

    def count() -> torch.Tensor:
        return (require_values(lengths, "sequence lengths").long() + page_size - 1) // page_size

    def indices() -> torch.Tensor:
        reached = torch.arange(table.shape[1], device=lengths.device)[None, :] < count()[:, None]
        return require_values(table, "block table")[: len(lengths)][reached].to(torch.int32)

    return Pages(lambda: starts_of(count()), indices, lambda: last_lengths(lengths, page_size), page_size)


def last_lengths(lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens in the last page of each sequence; 0 where it has none."""
    rest = (require_values(lengths, "sequence lengths") - 1) % page_size + 1
    return torch.where(lengths > 0, rest, 0).to(torch.int32)


def listed_pages(indptr: torch.Tensor, indices: torch.Tensor, last: MakeTensor, page_size: int) -> Pages:
    """FlashInfer's own arguments; `indices` may be a buffer longer than what `indptr` reaches."""

    def reached() -> torch.Tensor:
        end = int(require_values(indptr, "page starts")[-1])
        return require_values(indices, "page indices")[:end].to(torch.int32)

    return Pages(lambda: require_values(indptr, "page starts"), reached, last, page_size)


def listed_slots(indptr: torch.Tensor, slots: torch.Tensor) -> Pages:
    """SGLang's list of slots, each a page of one row."""
    return listed_pages(indptr, slots, lambda: (indptr.diff() > 0).to(torch.int32), 1)


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """[0, n0, n0 + n1, …] as int32."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


@dataclass(frozen=True)
class PagedBatch:
    """The queries of an invocation and the pages that they read.

    `tokens`: rows of queries. `starts`: where each sequence's begin, [sequences + 1]; a decode may have none.
    """

    tokens: int
    pages: Pages
    starts: torch.Tensor | None
    decode: bool

    @property
    def axis(self) -> str:
        """Of the queries' rows, as FlashInfer names it."""
        return "batch_size" if self.decode else "total_q"

    @property
    def axes(self) -> dict[str, int | None]:
        """The axes of the batch and of the pages; a page of one row has no last one to measure."""
        names = [self.axis, "num_pages", "len_indptr", "num_kv_indices"]
        names += ["batch_size"] if self.pages.page_size > 1 and not self.decode else []
        return {"page_size": self.pages.page_size, **dict.fromkeys(names)}

    @property
    def constraints(self) -> tuple[str, ...]:
        rows = "len_indptr == batch_size + 1" if self.decode else "total_q == qo_indptr[-1].item()"
        return rows, "num_kv_indices == kv_indptr[-1].item()"

    def inputs(self) -> dict[str, TensorArg]:
        """The index inputs."""
        pages, inputs = self.pages, {}
        if not self.decode:
            inputs["qo_indptr"] = lazy_arg("int32", ("len_indptr",), self.qo_indptr, "Query offsets for each sequence.")
        inputs["kv_indptr"] = lazy_arg("int32", ("len_indptr",), self.kv_indptr, "KV page offsets for each sequence.")
        inputs["kv_indices"] = lazy_arg("int32", ("num_kv_indices",), pages.indices, "Page IDs for KV cache lookups.")
        if pages.page_size > 1:
            text = "Number of valid tokens in the last page of each sequence."
            inputs["kv_last_page_len"] = lazy_arg("int32", ("batch_size",), pages.last, text)
        return inputs

    def queries(self) -> torch.Tensor:
        """Queries of each sequence."""
        return self.used().long() if self.decode else self.qo_indptr().diff()

    def used(self) -> torch.Tensor:
        """Of each sequence, whether it has tokens: the others are padding."""
        return self.pages.lengths() > 0

    def qo_indptr(self) -> torch.Tensor:
        """`starts`; Unrecognized where it leaves rows of padding, which a prefill's Definition does not know."""
        if self.starts is None or int(require_values(self.starts, "query starts")[-1]) != self.tokens:
            raise Unrecognized("its queries are padded")
        return self.starts.to(torch.int32)

    def kv_indptr(self) -> torch.Tensor:
        """Where each sequence's pages begin."""
        self.check_queries()
        return self.pages.indptr()

    def check_queries(self) -> None:
        """Unrecognized for a decode in which a sequence has not one query."""
        if self.decode and self.starts is not None:
            rows = torch.arange(self.tokens, device=self.starts.device)
            if bool(((require_values(self.starts, "query starts")[:-1] != rows) & self.used()).any()):
                raise Unrecognized("a sequence of its decode has not one query")

    def without_padding(self, rows: torch.Tensor, padding: float) -> torch.Tensor:
        """A decode's `rows` [tokens, …] with `padding` in those of sequences without tokens; without data as it is."""
        if not self.decode or rows.is_meta:
            return rows
        return torch.where(self.used().to(rows.device).reshape(-1, *[1] * (rows.dim() - 1)), rows, padding)


@dataclass(frozen=True)
class PageTable:
    """What an engine passes to a decode. `pages`: [sequences or more, pages], `lengths`: [sequences], of which each has
    one query, in that order. `lse`: natural, [heads, tokens], if the operator returns it."""

    pages: torch.Tensor
    lengths: torch.Tensor
    operator: OperatorFacts
    lse: MakeTensor | None = None

    def reached(self, batch: PagedBatch) -> torch.Tensor:
        """A row for each sequence of `batch`, with -1 in what it does not reach; without data a view of the table."""
        rows = self.pages[: len(self.lengths)]
        if rows.is_meta:
            return rows
        batch.check_queries()
        page = torch.arange(rows.shape[1], device=rows.device)
        return torch.where(page * batch.pages.page_size < self.lengths[:, None], rows, -1)

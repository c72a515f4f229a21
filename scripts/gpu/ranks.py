"""Engines of several ranks: how `parallel.py` starts them, what each rank must have run, and the group's replays."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from check import ROOT, SGLANG, sglang_python
from counts import LEAST_SHARE, Check, base

from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.recording.values import Group
from kcap.schemas.results import coverage
from kcap.schemas.results.measurement import read_measurements, read_program_measurements
from kcap.schemas.results.plan import NAMESPACE

LLAMA, MOE, TINY = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "kcap/tiny-llama"
KINDS = {  # of kernels, by operator without its overload
    "vLLM": {
        "linears": r"aten::(linear|mm|addmm)|_C::(weight_packed_linear|onednn_mm|dynamic_.*linear)",
        "attentions": r"_vllm_fa[23]_C::(varlen_)?fwd|_C::cpu_attention_with_kv_cache|flashinfer::Batch\w+Wrapper",
        "cache updates": r"_C_cache_ops::reshape_and_cache\w*|_C::cpu_attn_reshape_and_cache",
        "all-reduces": r"_C_custom_ar::all_reduce|vllm::all_reduce|_C::shm_allreduce|c10d::allreduce_|"
        r"flashinfer::allreduce_fusion",
        "experts' products": r"triton::fused_moe_kernel\w*|_C::fused_experts_cpu|_C::cpu_fused_moe\w*",
        "exchanges": r"pynccl::\w+",
    },
    "SGLang": {
        "linears": r"aten::(linear|mm|addmm|matmul)",
        "attentions": r"triton::_fwd_(grouped_)?kernel(_stage1|_unified)?",
        "cache updates": r"sglang::store_cache|aten::index_put_",
        "collectives": r"sglang::(in|out)place_all_reduce|sglang::reg_(all_gather_into|reduce_scatter)_tensor|"
        r"sgl_kernel::all_reduce|c10d::(allreduce|_allgather_base|_reduce_scatter_base)_",
        "experts' products": r"triton::fused_moe_kernel",
    },
}
REDUCED_ALONE = '"pass_config":{"fuse_allreduce_rms":false}'  # not with its norm by FlashInfer; vLLM 0.22 and newer
STUBS = ROOT / "tests/engines/sglang_cpu/stubs"  # for what SGLang has no build of for a CPU


@dataclass(frozen=True)
class Setup:
    """How a Recording is made. `each`: the kernels of a step on each rank, of which `last` are those of the last stage.

    `ranks`: of its engine; `replicas`: engines. `size`: of the groups of its collectives. `fused`: with
    FlashInfer's kernel of an all-reduce with its norm.
    """

    model: str
    layers: int
    ranks: int
    each: Mapping[str, int]
    arguments: tuple[str, ...] = ()
    replicas: int = 1
    last: Mapping[str, int] | None = None
    eager: bool = False
    framework: str = "vLLM"
    fused: bool = False

    @property
    def size(self) -> int:
        return self.ranks * self.replicas

    def serving(self) -> tuple[str, ...]:
        """The arguments of an engine that serves on GPUs."""
        if self.framework == "SGLang":
            return (*SGLANG, "attention_backend=triton", "max_running_requests=32", "cuda_graph_max_bs_decode=16")
        config = '"cudagraph_capture_sizes":[1,4,16]' + ("" if self.fused else f",{REDUCED_ALONE}")
        return ("max_num_batched_tokens=2048", "max_num_seqs=32", f"compilation_config={{{config}}}")


def setups(ranks: int, gpu: bool) -> dict[str, Setup]:
    dense, layers = (LLAMA, 4) if gpu else (TINY, 2)
    per_layer = {"attentions": layers, "cache updates": layers}
    whole = {"linears": 4 * layers + 1, **per_layer}
    sparse = {"linears": 3 * layers + 1, **per_layer, "experts' products": (2 if gpu else 1) * layers}
    exchanged = {"exchanges": 2 * layers}  # before each layer's experts the tokens are gathered, after them reduced
    reduced = {"all-reduces": 2 * layers + 1}  # each layer's two, and the embedding's
    moe = ("enable_expert_parallel=true", *(("moe_backend=triton",) if gpu else ()))
    half = {"linears": 2 * layers, **{kind: count // 2 for kind, count in per_layer.items()}}
    tensor = f"tensor_parallel_size={ranks}"
    every = {
        "tensor": Setup(dense, layers, ranks, whole | reduced, (tensor,), eager=not gpu),
        "nccl": Setup(dense, layers, ranks, whole | reduced, (tensor, "disable_custom_all_reduce=true")),
        "experts": Setup(MOE, layers, ranks, sparse | reduced, (tensor, *moe), eager=not gpu),
        "pipeline": Setup(dense, layers, 2, half, ("pipeline_parallel_size=2",), last={"linears": 1}),
        "data": Setup(dense, layers, 1, whole, replicas=2, eager=not gpu),
        "data-experts": Setup(MOE, layers, 1, sparse | exchanged, moe, replicas=2),
        "fused": Setup(dense, layers, ranks, whole | reduced, (tensor,), fused=True),
        **sglang_setups(dense, layers, ranks, gpu),
    }
    gpu_only = ("nccl", "fused", "data-experts", "sglang-nccl", "sglang-data-attention")
    return every if gpu else {name: setup for name, setup in every.items() if name not in gpu_only}


def sglang_setups(dense: str, layers: int, ranks: int, gpu: bool) -> dict[str, Setup]:
    """SGLang with tensor parallelism, and with attention in data parallel before experts in tensor parallel.

    The latter gathers the replicas' tokens before the experts of a layer and gives them back after, and does so around
    the logits. A prefill of PyTorch's attention, on a CPU, has a kernel for each sequence: it is not counted.
    """
    exchanged = {"collectives": 2 * layers + 2}  # each layer's two; the embedding's and the logits', or the logits' two
    caches = {"attentions": layers, "cache updates": layers} if gpu else {"cache updates": 2 * layers}  # keys, values
    tensor = {"linears": 4 * layers + 1, **caches, **exchanged}
    data = {"linears": 3 * layers + 1, "attentions": layers, "experts' products": 2 * layers, **exchanged}
    apart = ("tp_size=2", "dp_size=2", "enable_dp_attention=true", "moe_runner_backend=triton")
    return {
        "sglang-tensor": Setup(dense, layers, ranks, tensor, (f"tp_size={ranks}",), framework="SGLang"),
        "sglang-nccl": Setup(
            dense, layers, ranks, tensor, (f"tp_size={ranks}", "disable_custom_all_reduce=true"), framework="SGLang"
        ),
        "sglang-data-attention": Setup(MOE, layers, 2, data, apart, framework="SGLang"),
    }


def interpreter(framework: str, gpu: bool, script: bool = False) -> tuple[str, ...]:
    """The words that start the Python which has the engine; SGLang's is another than vLLM's. `script`: for one of
    these, which imports what lies beside it."""
    if framework == "vLLM":
        return (sys.executable,)
    stubs = () if gpu else ("env", f"PYTHONPATH={STUBS}", *(() if script else ("PYTHONSAFEPATH=1",)))
    return (*stubs, sglang_python())


def totals(calls: Iterable[Call], of: Callable[[Call], str | None]) -> dict[int, Counter[str]]:
    """For each rank how often `calls` ran in steps of requests, by what `of` says of a Call; None is left out."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for call in calls:
        if (name := of(call)) is not None:
            for count in call.counts:
                found[count.rank][name] += count.count if count.phase != "other" else 0
    return found


def kind_of(call: Call, framework: str) -> str | None:
    return next((kind for kind, names in KINDS[framework].items() if re.fullmatch(names, base(call))), None)


def check_ranks(recording: Recording, setup: Setup) -> list[Check]:
    """Of each rank as many kernels as the architecture says; which collectives it ran, in which group, on what."""
    ranks = recording.metadata.ranks
    rows = [Check("ranks", f"{len(ranks)} of {setup.size}", len(ranks) == setup.size)]
    found = totals(recording.kernels(), partial(kind_of, framework=setup.framework))
    for place in ranks:
        steps = sum(count for phase, count in place.steps.items() if phase != "other")
        last = setup.last or {} if place.rank == ranks[-1].rank else {}
        texts, right = [], steps > 0 and place.ended
        for kind, each in setup.each.items():
            each += last.get(kind, 0)
            texts.append(f"{found[place.rank][kind]} {kind} = {each} x {steps}")
            right = right and found[place.rank][kind] == each * steps
        rows.append(Check(f"rank {place.rank}", ", ".join(texts), right))
    same = recording.metadata.disagreements
    rows.append(Check("ranks agree", str(same[:2]) if same else "True", not same))
    rows += check_groups(recording, setup)
    taps = [f"{tap.name}: {tap.detail}" for tap in recording.metadata.taps if tap.status == "failed"]
    complete = recording.metadata.complete and not taps
    return [*rows, Check("complete", "; ".join(taps) or str(recording.metadata.complete), complete)]


def check_groups(recording: Recording, setup: Setup) -> Iterator[Check]:
    """A line for each collective: how often it ran, in which groups, and the bytes of its largest tensor."""
    collectives = defaultdict(list)
    for call in recording.kernels():
        if call.group is not None:
            collectives[base(call)].append(call)
    if not collectives and {"all-reduces", "collectives"} & set(setup.each):
        yield Check("collectives", "none", False)
    for operator, calls in collectives.items():
        groups = {f"{call.group.name or 'unnamed'} of {call.group.size}" for call in calls if call.group}
        moved = [max((spec.numel * spec.bits // 8 for _, spec in call.tensors()), default=0) for call in calls]
        text = f"{sum(call.total for call in calls)} in {', '.join(sorted(groups))}"
        text += f", {min(moved):,} to {max(moved):,} bytes"
        sizes = {call.group.size for call in calls if call.group}
        whole = min(moved) > 0 or "recv" in operator  # which returns what it got
        yield Check(operator, text, whole and sizes == {setup.size})


def check_coverage(recording: Recording) -> list[Check]:
    """The share of each rank's GPU time in the profiled steps that is of recorded calls."""
    if not (recording.path / coverage.FILE).is_file():
        return [Check("GPU time", "no step was profiled", False)]
    times: dict[int, list[float]] = {place.rank: [0.0, 0.0] for place in recording.metadata.ranks}
    for step in coverage.read(recording.path / coverage.FILE):
        explained, whole = times.setdefault(step.rank, [0.0, 0.0])
        times[step.rank] = [explained + step.explained_us, whole + step.gpu_us]
    shares = {rank: explained / whole if whole else 0.0 for rank, (explained, whole) in times.items()}
    return [Check(f"GPU time of rank {rank}", f"{share:.2%}", share >= LEAST_SHARE) for rank, share in shares.items()]


def check_collectives(measured: Path, ranks: int) -> list[Check]:
    """Each collective that was replayed, by as many processes as its group had."""
    rows = []
    for one in read_measurements(measured):
        if any(isinstance(argument.value, Group) for argument in one.args):
            text = one.reason or ""
            if one.median_us is not None:
                text = (
                    f"{one.median_us:.1f} us by {one.ranks} ranks, {one.method}, waited {one.waited_us or 0.0:.1f} us"
                )
            rows.append(
                Check(f"{one.operator} {one.bytes or 0:,} bytes", text, one.status == "ok" and one.ranks == ranks)
            )
    return rows or [Check("collectives", "none was replayed", False)]


def check_programs(measured: Path, ranks: int) -> list[Check]:
    rows = []
    for one in read_program_measurements(measured):
        text = (
            one.reason
            or f"{one.median_us or 0.0:.1f} us by {one.ranks} ranks, which waited {one.waited_us or 0.0:.1f} us"
        )
        text += f"; {one.left_out} of {one.left_out + one.replayed} left out" if one.left_out else ""
        rows.append(Check(f"Program {one.program}", text, one.status == "ok" and one.ranks == ranks))
    return rows or [Check("Programs", "none was replayed", False)]


def check_applied(recording: Recording, ranks: int) -> list[Check]:
    found = totals(recording.calls, lambda call: "solutions" if call.namespace == NAMESPACE else None)
    counts = [found[rank]["solutions"] for rank in range(ranks)]
    return [Check("Solutions that ran, by rank", str(counts), counts[0] > 0 and len(set(counts)) == 1)]

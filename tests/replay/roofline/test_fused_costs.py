"""What a fused kernel must move at least: what it certainly reads of each input, and what it writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kcap.replay.roofline.fused import cost_of_fused, read_shares
from kcap.schemas.derive.fragment.reference import FragmentReference, Port
from kcap.schemas.recording.recording import load
from kcap.schemas.results.measurement import read_measurements

INTERMEDIATE, QUERIES, KEYS = 14336, 4096, 1024
SIZE = 12


@pytest.mark.parametrize(
    "taken, body, shares",
    [
        ("x", "x.relu()", [1.0]),
        ("x", "x.float().mean(-1)", [1.0]),
        ("x", "x[:, :6] * x[:, 6:]", [1.0]),
        ("x", "x[:, :6] * 2", [0.5]),
        ("x", "x[:, :6] + x[:, 3:9]", [0.75]),
        ("x", "x[:, 2] + x[:, -1]", [2 / SIZE]),
        ("x", "(lambda parts: parts[0] * parts[2])(aten.split.Tensor(x, 4, -1))", [2 / 3]),
        ("x", "(lambda q: torch.cat([q[:, 3:], q[:, :3]], -1))(aten.split_with_sizes(x, [6, 6], -1)[1])", [0.5]),
        ("x", "x.view(2, 2, 6, 2)[:, :, ::2]", [0.0]),
        ("x", "(x + 1)[:, :6]", [0.0]),
        ("mxy", "torch.where(m, x, y)", [1.0, 0.0, 0.0]),
        ("xi", "aten.embedding(x, i) + 1", [0.0, 1.0]),
        ("xi", "aten.index.Tensor(x, [i])", [0.0, 1.0]),
    ],
)
def test_what_is_certainly_read(taken: str, body: str, shares: list[float]) -> None:
    """Of a slice of what was computed it is not told which inputs went into it: they count nothing."""
    kinds = {"x": ((4, SIZE), "float32"), "y": ((4, SIZE), "float32"), "m": ((4, SIZE), "bool"), "i": ((5,), "int64")}
    inputs = tuple(Port(name, str(place), *kinds[name]) for place, name in enumerate(taken))
    source = f"import torch\naten = torch.ops.aten\n\n\ndef run({', '.join(taken)}):\n    return {body}\n"
    assert read_shares(FragmentReference(source, inputs, ())) == pytest.approx(shares)


def test_kernels_of_a_real_engine(llama_in_two_engines: Path) -> None:
    """And none was as fast on its GPU as would break its floor."""
    recording = load(llama_in_two_engines / "vllm.kcap")
    measured = read_measurements(llama_in_two_engines / "vllm.measurements.jsonl")
    times = {one.call: one.median_us for one in measured if one.median_us}
    seen = Counter[str]()
    for call in recording.kernels():
        if call.launch is None or (cost := cost_of_fused(call, recording)) is None:
            continue
        name = call.operator.split("::")[1].split(".")[0]
        rows = next(spec.shape[0] for _, spec in call.tensors())
        if name == "mul_silu_slice":
            assert (cost.bytes, cost.read) == (2 * rows * 3 * INTERMEDIATE, 2 * rows * 2 * INTERMEDIATE)
        elif name == "fused":  # the rotary embedding of queries, or of keys too, whose table is read in rows
            assert cost.read in (rows * (2 * QUERIES + 8), rows * (2 * KEYS + 8), rows * (2 * (QUERIES + KEYS) + 8))
        seen[name] += 1
        assert call.id not in times or cost.bytes / times[call.id] / 1e3 < 5376
    assert len(seen) == 4 and min(seen.values()) >= 4

"""What kcap makes of a real TensorRT-LLM, which its adapter has not yet met: a table to report.

    python scripts/gpu/trtllm_check.py [--model meta-llama/Llama-3.1-8B] [--num-layers 4] [--engine-arg KEY=VALUE]

The model, a dense Llama-like one with dummy weights, generates three times: unrecorded, unrecorded again (the control:
kernels may differ from run to run by themselves), and recorded with its coverage. Checked are the hooks, the tokens,
that the Recording is complete, its steps, what each decode step must have run by the architecture (4 products a layer
and one of the logits, one attention a layer), and the share of the GPU time that is of recorded calls. Exits with 1 if
a check fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from counts import Check
from marks import mark

from kcap.capture.controller.frameworks import check_hooks, find_model
from kcap.capture.engines import Start
from kcap.capture.engines.trtllm import adapter
from kcap.schemas.recording.recording import Recording, load

PRODUCTS = re.compile(r"::(linear|addmm|matmul|\w*mm|\w*gemm\w*)(\.\w+)?$")
ATTENTIONS = re.compile(r"attention|fmha|flashinfer::Batch\w+\.run", re.IGNORECASE)
PROMPTS, TOKENS = 4, 16
LEAST_SHARE = 0.97
PROGRAM = """
import json, sys
if __name__ == "__main__":  # workers import it, too
    from tensorrt_llm import LLM, SamplingParams
    arguments, output = json.loads(sys.argv[1]), sys.argv[2]
    llm = LLM(**arguments)
    prompts = [[(7 * i + 13 * j) % 500 + 3 for j in range(32 + 16 * i)] for i in range({prompts})]
    ending = dict(ignore_eos=True, end_id=-1, pad_id=-1)
    params = SamplingParams(max_tokens={tokens}, temperature=0.0, detokenize=False, **ending)
    tokens = [list(done.outputs[0].token_ids) for done in llm.generate(prompts, params)]
    open(output, "w").write(json.dumps(tokens))
    llm.shutdown()
"""


def generate(arguments: dict[str, Any], folder: Path, *record: str) -> list[list[int]]:
    """The tokens of one run, behind the words of `record`."""
    program, output = folder / "program.py", folder / "tokens.json"
    program.write_text(PROGRAM.format(prompts=PROMPTS, tokens=TOKENS))
    words = [*record, sys.executable, str(program), json.dumps(arguments), str(output)]
    done = subprocess.run(words, capture_output=True, text=True)
    if not output.is_file():
        sys.exit(f"{' '.join(words[:6])} … did not run:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    tokens: list[list[int]] = json.loads(output.read_text())
    output.unlink()
    return tokens


def checks(arguments: dict[str, Any], layers: int, path: Path) -> Iterator[Check]:
    """In the order of what can be reported where one fails."""
    for hook in check_hooks(adapter.FRAMEWORK):
        yield Check(hook.name, hook.found, hook.state == "ok")
    coverage = ["--check-coverage"] if torch.cuda.is_available() else []
    record = (sys.executable, "-m", "kcap", "record", "--force", *coverage, "-o", str(path), "--")
    plain, control = generate(arguments, path.parent), generate(arguments, path.parent)
    recorded = generate(arguments, path.parent, *record)
    alike = "the same" if plain == control else "other, without kcap"
    yield Check(
        "tokens recorded", f"{'the same' if recorded == plain else 'other'} (control: {alike})", recorded == plain
    )
    yield from of_recording(load(path), layers)


def of_recording(recording: Recording, layers: int) -> Iterator[Check]:
    """What the Recording of that run must hold."""
    metadata = recording.metadata
    bad = [f"{tap.name} {tap.status}: {tap.detail}" for tap in metadata.taps if tap.status in ("failed", "off")]
    yield Check("framework", f"{metadata.framework} {metadata.framework_version}", metadata.framework == "TRT-LLM")
    yield Check("the Recording is complete", "; ".join(bad) or str(metadata.complete), metadata.complete and not bad)
    steps = metadata.steps
    generated = steps.get("decode", 0) >= TOKENS - 2 and bool(steps.get("prefill", 0) + steps.get("mixed", 0))
    yield Check("steps", ", ".join(f"{number} {phase}" for phase, number in steps.items()), generated)
    ran: Counter[str] = Counter()
    for call in recording.kernels():
        ran["products"] += call.counted("decode") * bool(PRODUCTS.search(call.operator))
        ran["attentions"] += call.counted("decode") * bool(ATTENTIONS.search(f"{call.operator} {call.parent}"))
    for purpose, each in (("products", 4 * layers + 1), ("attentions", layers)):
        wanted = each * steps.get("decode", 0)
        yield Check(
            f"{purpose} of decode steps", f"{ran[purpose]}, by the architecture {wanted}", ran[purpose] == wanted
        )
    share = (metadata.coverage or {}).get("share")
    told = "no step was profiled" if share is None else f"{share:.1%} of the GPU time"
    yield Check("coverage", told, share is not None and share >= LEAST_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="of tensorrt_llm.LLM, JSON"
    )
    parser.add_argument("-o", "--output", type=Path, help="keep the Recording here")
    args = parser.parse_args()
    given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in args.engine_arg)}
    start = Start(find_model(args.model, "dummy"), "dummy", args.num_layers, False, given, 2048)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(
            checks(adapter.arguments(start), args.num_layers, (args.output or Path(folder, "trtllm.kcap")).resolve())
        )
    for row in rows:
        print(f"{mark(row.passed)}  {row.what}: {row.found}")
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()

"""What recording costs a server under load, and how large its Recording becomes: a real server with a real client.

    python scripts/gpu/live_load.py [--framework vLLM] [--model meta-llama/Llama-3.1-8B] [--load 32 --load rate=8]
        [--pairs 5] [--uneven] [--agent-trace]

Starts `vllm serve` (or SGLang's server) under `kcap record --window manual`, dummy weights and a tokenizer of made-up
words, and sends the requests of `vllm bench serve` (`sglang.bench_serving`, which needs `pip install datasets`) again
and again (random, 512 tokens in, 128 out; with `--uneven` each request has lengths of its own): at most so many at once
(`--load 32`) or so many a second (`--load rate=8`).
A pair is a round with the window closed and one with it open, in alternating order; before each pair stands another
with it closed, whose ratio to the pair's own is the A/A spread. `--plain` begins with rounds of a server without kcap.
With `--agent-trace` the requests are recorded, too, and what a round is held against is a second server, without kcap,
which stands on the same GPU meanwhile: give both less of its memory by `--server-arg`. `--pairs 0` is one recorded
round alone: with `--load 32 --num-prompts 5000` some 20,000 steps. Ends with a table, and what the Recording holds: its
size, its Calls by operator; of an agent trace the costliest turns, and the share of GPU time that no request accounts
for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from servers import FIGURES, SERVERS, Load, Round, model_with_tokenizer, round_of, server

import kcap
from kcap.capture.controller import window_control
from kcap.capture.session import Session


def shown(rounds: list[Round]) -> str:
    return "  ".join(f"{statistics.mean(each[name] for each in rounds):10.2f}" for name in FIGURES)


def load_of(words: str, given: argparse.Namespace) -> Load:
    """`32`, or `rate=8`."""
    if words.startswith("rate="):
        rate = float(words.removeprefix("rate="))
        return Load(
            given.num_prompts or round(20 * rate), given.input_len, given.output_len, rate=rate, uneven=given.uneven
        )
    count = given.num_prompts or max(128, 5 * int(words))
    return Load(count, given.input_len, given.output_len, concurrency=int(words), uneven=given.uneven)


@contextlib.contextmanager
def recording(session: Session) -> Iterator[None]:
    """The window is open until the block ends."""
    window_control.open_window(session)
    yield
    window_control.close_window(session)


def pairs_of(words: str, model: Path, recorded: Path, ports: tuple[int, int], given: argparse.Namespace) -> list[str]:
    """`ports`: of the server that is not recording, and of the one that is; both may be the same."""
    load = load_of(words, given)
    session = window_control.find_session(recorded)
    if not given.pairs:
        with recording(session):
            alone = round_of(given.framework, model, load, 1, ports[True])
        return [f"{words:>8}  open    {shown([alone])}"]
    closed, opened, loss, spread = list[Round](), list[Round](), list[float](), list[float]()
    for port in sorted(set(ports)):
        round_of(given.framework, model, load, 1, port)
    number = 2
    for pair in range(given.pairs):
        control = round_of(given.framework, model, load, number, ports[False])
        ran = {}
        for on in (pair % 2 == 0, pair % 2 == 1):
            with recording(session) if on else contextlib.nullcontext():
                ran[on] = round_of(given.framework, model, load, number + 1 + on, ports[on])
        number += 3
        closed += [control, ran[False]]
        opened.append(ran[True])
        loss.append(1 - ran[True][FIGURES[0]] / ran[False][FIGURES[0]])
        spread.append(abs(1 - control[FIGURES[0]] / ran[False][FIGURES[0]]))
        print(f"load {words}, pair {pair + 1}: {loss[-1]:.2%} lost, A/A {spread[-1]:.2%}", flush=True)
    return [
        f"{words:>8}  closed  {shown(closed)}",
        f"{words:>8}  open    {shown(opened)}  loss median {statistics.median(loss):.2%}, "
        f"mean {statistics.mean(loss):.2%}; A/A median {statistics.median(spread):.2%}, at most {max(spread):.2%}",
    ]


def contents(path: Path) -> list[str]:
    """What the Recording holds, and where its bytes are."""
    recording = kcap.load(path)
    sizes = Counter[str]()
    for file in path.rglob("*"):
        if file.is_file():
            sizes[file.relative_to(path).parts[0]] += file.stat().st_size
    by_operator = Counter(call.operator for call in recording.calls)
    samples = Counter(recording.calls[sample.call].operator for sample in recording.samples)
    steps = recording.metadata.steps
    return [
        f"Recording: {sum(sizes.values()) / 1e6:.1f} MB of {sum(steps.values())} steps {steps}; complete: "
        f"{recording.metadata.complete}, dropped {recording.metadata.dropped}",
        "  " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.most_common(6)),
        f"  {len(recording.calls)} Calls: " + ", ".join(f"{name} {n}" for name, n in by_operator.most_common(12)),
        f"  {len(recording.samples)} Samples: " + ", ".join(f"{name} {n}" for name, n in samples.most_common(12)),
        f"  {len(recording.programs)} Programs, {len(recording.steps)} listed steps",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=list(SERVERS), default="vLLM")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--load", action="append", help="32 and 256 at once without it")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, help="of a round")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--uneven", action="store_true", help="lengths are drawn for each request")
    parser.add_argument("--plain", type=int, default=0, metavar="ROUNDS", help="first so many of a server without kcap")
    parser.add_argument("--agent-trace", action="store_true", help="beside a server without kcap")
    parser.add_argument("--server-arg", action="append", default=[], help="one more of the server")
    parser.add_argument("-o", "--output", type=Path, help="keep the Recording here")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="live-load-"))
    model = model_with_tokenizer(given.model, folder / "model", given.num_layers)
    loads: list[str] = given.load or ["32", "256"]
    table, recorded = list[str](), given.output or folder / "out.kcap"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if given.plain:
        with server(given.framework, model, given.server_arg, None, folder / "plain.log") as port:
            for load in loads:
                seeds = range(1 + given.plain)
                rounds = [round_of(given.framework, model, load_of(load, given), seed, port) for seed in seeds]
                table.append(f"{load:>8}  plain   {shown(rounds[1:])}")
                print(table[-1], flush=True)
    with contextlib.ExitStack() as servers:
        started = partial(server, given.framework, model, given.server_arg)
        options = ["--agent-trace"] if given.agent_trace else []
        port = servers.enter_context(started(recorded, folder / "recorded.log", *options))
        ports = (port, port)
        if given.agent_trace:
            ports = (servers.enter_context(started(None, folder / "plain.log")), port)
        for load in loads:
            rows = pairs_of(load, model, recorded, ports, given)
            print(*rows, sep="\n", flush=True)
            table += rows
    print("\n" + "\n".join([f"{'load':>8}  window  " + "  ".join(f"{name[:10]:>10}" for name in FIGURES), *table]))
    print("\n".join(contents(recorded)))
    if given.agent_trace:
        subprocess.run([sys.executable, "-m", "kcap", "show", str(recorded), "--by", "turn", "--top", "8"], check=True)


if __name__ == "__main__":
    main()

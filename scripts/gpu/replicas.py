"""Replicas of data parallelism in vLLM, each an engine in a process of its own, which get the same number of prompts.

    kcap record -o data.kcap -- python scripts/gpu/replicas.py MODEL LAYERS REPLICAS [--eager] [KEY=VALUE]…

MODEL is a configuration that kcap has; the weights are random.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import torch

from kcap.capture.controller.frameworks import find_model
from kcap.capture.controller.offline import engine_arguments
from kcap.capture.engines import Start
from kcap.capture.engines.vllm import adapter

RANK = "VLLM_DP_RANK"


def start_all(replicas: int) -> int:
    """The worst exit status of `replicas` processes that run this program."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    running = []
    for rank in range(replicas):
        place = {RANK: rank, "VLLM_DP_RANK_LOCAL": rank, "VLLM_DP_SIZE": replicas}
        place |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
        place |= {} if torch.cuda.is_available() else {"VLLM_CPU_OMP_THREADS_BIND": cores[rank % len(cores)]}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        running.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    return max(abs(process.wait()) for process in running)


def generate(model: str, layers: int, eager: bool, arguments: list[str]) -> None:
    from vllm import LLM, SamplingParams

    prompts, length, output = (16, 256, 32) if torch.cuda.is_available() else (2, 24, 4)
    start = Start(find_model(model, "dummy"), "dummy", layers, eager, engine_arguments(tuple(arguments)), 2048)
    llm = LLM(**adapter.arguments(start), enable_prefix_caching=False)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(2):  # the steps of the first time are those that --check-coverage profiles
        ids = [[(7 * i + j) % 1000 + 3 for j in range(length)] for i in range(prompts)]
        llm.generate([{"prompt_token_ids": prompt} for prompt in ids], params, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("replicas", type=int)
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    if RANK not in os.environ:
        sys.exit(start_all(args.replicas))
    generate(args.model, args.layers, args.eager, args.arguments)


if __name__ == "__main__":
    main()

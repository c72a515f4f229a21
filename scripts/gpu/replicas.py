"""Replicas of data parallelism in vLLM, which get the same number of prompts each.

    kcap record -o data.kcap -- python scripts/gpu/replicas.py MODEL LAYERS REPLICAS [--eager] [KEY=VALUE]…

MODEL is a configuration that kcap has; the weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import torch

from kcap.capture.controller.frameworks import find_model
from kcap.capture.controller.offline import engine_arguments
from kcap.capture.engines import Start
from kcap.capture.engines.vllm import adapter


async def generate(arguments: dict[str, Any], replicas: int) -> None:
    """Each replica answers its prompts twice: the steps of the first time are those that --check-coverage profiles."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    prompts, length, output = (16, 256, 32) if torch.cuda.is_available() else (2, 24, 4)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, data_parallel_size=replicas))

    async def answer(turn: int, number: int, replica: int) -> None:
        prompt: Any = {"prompt_token_ids": [(7 * number + j) % 1000 + 3 for j in range(length)]}
        async for _ in engine.generate(prompt, params, f"{turn}-{number}-{replica}", data_parallel_rank=replica):
            pass

    for turn in range(2):
        await asyncio.gather(*(answer(turn, number, rank) for number in range(prompts) for rank in range(replicas)))
    engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("replicas", type=int)
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    given = {"enable_prefix_caching": False, **engine_arguments(tuple(args.arguments))}
    start = Start(find_model(args.model, "dummy"), "dummy", args.layers, args.eager, given, 2048)
    asyncio.run(generate(adapter.arguments(start), args.replicas))


if __name__ == "__main__":
    main()

"""A small Llama for TVM's Relax VM, with the entry points of MLC-LLM's model libraries; and a program that runs it.

python tvm_llama.py build FILE    compiles it (3 to 20 s)
python tvm_llama.py run FILE      two sequences: prefill, decodes; then a third is prefilled beside them, and all decode

With `--cuda` it is for an NVIDIA GPU of compute capability 9.0, where the decodes of a batch are CUDA graphs. With
`--llama-8b` it has the widths of Llama-3.1-8B, in half precision. Running it needs TVM's runtime only.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm_ffi import Shape

CPU, CUDA = 1, 2  # DLPack's kinds of devices
PAGE, CHUNK, SEQUENCES, TOKENS = 16, 64, 4, 256  # the last three: of a prefill, and of the cache, at most


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    dtype: str
    layers: int = 2

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def weights(self) -> list[tuple[int, ...]]:
        """Their shapes, in the order in which a library takes them."""
        hidden, qkv = self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim
        products = [(qkv, hidden), (hidden, hidden), (2 * self.intermediate, hidden), (hidden, self.intermediate)]
        layer = [*products, (hidden,), (hidden,)]
        return [(self.vocabulary, hidden), *(layer * self.layers), (hidden,), (self.vocabulary, hidden)]


TINY = Sizes(4, 2, 16, 128, 256, "float32")
LLAMA_8B = Sizes(32, 8, 128, 14336, 128256, "float16")


class Engine:
    """What MLC-LLM's engine does with a library: the global loader, the VM, the cache, its sequences."""

    def __init__(self, path: str, sizes: Sizes = TINY, cuda: bool = False) -> None:
        self.hidden = sizes.hidden
        self.device = tvm.cuda(0) if cuda else tvm.cpu(0)
        self.vm = tvm_ffi.load_module(path)["vm_load_executable"]()
        self.vm["vm_initialization"](*((CUDA, 0, 2) if cuda else ()), CPU, 0, 2)
        draws = (np.random.default_rng(0).standard_normal(1 << 20) * 0.05).astype(sizes.dtype)
        self.weights = [self.tensor(np.resize(draws, shape)) for shape in sizes.weights]
        cache = (SEQUENCES, TOKENS, CHUNK, PAGE, 0)
        self.cache = self.vm["create_tir_paged_kv_cache"](*(Shape([size]) for size in cache))

    def tensor(self, array: Any) -> Any:
        return tvm.runtime.tensor(array, self.device)

    def add(self, sequence: int) -> None:
        tvm.get_global_func("vm.builtin.kv_state_add_sequence")(self.cache, sequence)

    def forward(self, tokens: dict[int, list[int]]) -> Any:
        """The logits after the new `tokens` of each sequence, on the device."""
        call = tvm.get_global_func
        flat = np.concatenate(list(tokens.values())).astype("int32")
        lengths = [len(new) for new in tokens.values()]
        embedded = self.vm["embed"](self.tensor(flat), self.weights)
        call("vm.builtin.kv_state_begin_forward")(self.cache, Shape(list(tokens)), Shape(lengths))
        if set(lengths) == {1}:
            embedded = call("vm.builtin.reshape")(embedded, Shape([len(lengths), 1, self.hidden]))
            logits = self.vm["batch_decode"](embedded, self.cache, self.weights)[0]
        else:
            embedded = call("vm.builtin.reshape")(embedded, Shape([1, len(flat), self.hidden]))
            last = self.tensor(np.cumsum(lengths).astype("int32") - 1)
            logits = self.vm["batch_prefill"](embedded, last, self.cache, self.weights)[0]
        call("vm.builtin.kv_state_end_forward")(self.cache)
        return logits.copyto(self.device)


def run(path: str, sizes: Sizes = TINY, cuda: bool = False, decodes: int = 2, late_decodes: int = 0) -> None:
    """Prints a hash of all logits. `late_decodes`: those of all three sequences."""
    engine = Engine(path, sizes, cuda)
    engine.add(0)
    engine.add(1)
    outputs = [engine.forward({0: [1, 2, 3, 4, 5], 1: [6, 7, 8]})]
    outputs += [engine.forward({0: [9 + 2 * step], 1: [10 + 2 * step]}) for step in range(decodes)]
    engine.add(2)
    outputs.append(engine.forward({2: [5, 6, 7], 0: [1], 1: [2]}))
    outputs += [engine.forward({0: [3 + step], 1: [4 + step], 2: [5 + step]}) for step in range(late_decodes)]
    logits = [output.numpy() for output in outputs]
    print("outputs", hashlib.sha256(b"".join(map(np.ndarray.tobytes, logits))).hexdigest())
    print("finite", all(bool(np.isfinite(each).all()) for each in logits))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "run"))
    parser.add_argument("file")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--llama-8b", action="store_true")
    parser.add_argument("--decodes", type=int, default=2, help="of the first two sequences  [default: 2]")
    parser.add_argument("--late-decodes", type=int, default=0, help="of all three  [default: 0]")
    args = parser.parse_args()
    sizes = LLAMA_8B if args.llama_8b else TINY
    if args.action == "build":
        from tvm_llama_model import build

        build(args.file, sizes, args.cuda)
    else:
        run(args.file, sizes, args.cuda, args.decodes, args.late_decodes)

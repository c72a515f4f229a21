"""The models of the zoo that need more than token ids, as programs: an adapter, pictures, sound.

    kcap record -o lora.kcap -- python scripts/gpu/zoo_programs.py lora meta-llama/Llama-3.1-8B LAYERS
                                       [--framework SGLang] [--engine-arg KEY=VALUE]…

Each writes what the model needs beside its configuration (random adapters, a tokenizer that knows the special tokens),
starts the engine with dummy weights and generates. `speech` is for vLLM alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kcap.capture.controller.models import find_config
from kcap.capture.controller.offline import engine_arguments
from kcap.errors import CallError

ANSWER = 16  # tokens
CUDA = torch.cuda.is_available()
HALF = CUDA or torch.cpu._is_avx512_supported()  # without AVX-512 a CPU takes minutes for a product in bfloat16
TIMES = 2 if CUDA else 1  # --check-coverage profiles the steps of the first time, on a GPU
TYPE = "bfloat16" if HALF else "float32"
VLLM: dict[str, Any] = {  # as zoo.py starts the others
    "load_format": "dummy",
    "dtype": TYPE,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,  # else the second time has no prefill
    "compilation_config": {"cudagraph_capture_sizes": [1, 4, 16]},
    **({} if CUDA else {"enforce_eager": True}),
}
SGLANG: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": TYPE,
    "disable_radix_cache": True,
}
PROMPTS = [[(7 * i + 13 * j) % 400 + 3 for j in range(200 + 16 * i)] for i in range(8)]
RANK = 16
PICTURES = 4
PICTURE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>" + "what is this? " * 8


class Vllm:
    """Runs what is in `folder` with vLLM, with `given` as further arguments."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.folder, self.given = str(folder), given

    def lora(self, adapters: Sequence[Path]) -> None:
        from vllm.lora.request import LoRARequest

        requests = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(adapters, 1)]
        engine = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK, "max_model_len": 2048}
        engine["skip_tokenizer_init"] = True
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        asked = [requests[i % len(requests)] for i in range(len(prompts))]
        self._generate(engine, lambda: prompts, detokenize=False, lora_request=asked)

    def vision(self) -> None:
        from PIL import Image

        draw = np.random.default_rng(0)
        self._generate(
            {"max_model_len": 4096, "limit_mm_per_prompt": {"image": 1, "video": 0}},
            lambda: [
                {"prompt": PICTURE_TEXT, "multi_modal_data": {"image": Image.fromarray(picture)}}
                for picture in pictures(draw)
            ],
        )

    def speech(self) -> None:
        draw = np.random.default_rng(0)
        sounds = [draw.standard_normal(16_000 * (4 + 2 * i)).astype(np.float32) / 10 for i in range(4)]
        prompts = [
            {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (sound, 16_000)}},
                "decoder_prompt": "<|startoftranscript|><|l0|><|transcribe|><|notimestamps|>",
            }
            for sound in sounds
        ]
        self._generate({"max_model_len": 448, "limit_mm_per_prompt": {"audio": 1}}, lambda: prompts)

    def _generate(
        self, engine: dict[str, Any], prompts: Callable[[], list[Any]], detokenize: bool = True, **options: Any
    ) -> None:
        from vllm import LLM, SamplingParams

        llm = LLM(self.folder, **VLLM | engine | self.given)
        params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, detokenize=detokenize)
        for _ in range(TIMES):
            llm.generate(prompts(), params, use_tqdm=False, **options)


class Sglang:
    """Runs what is in `folder` with SGLang, with `given` as further arguments."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.folder, self.given = str(folder), given

    def lora(self, adapters: Sequence[Path]) -> None:
        """The adapters go to the engine as tensors: an engine with dummy weights reads no adapter from a file."""
        from safetensors.torch import load_file

        configs = [json.loads((path / "adapter_config.json").read_text()) for path in adapters]
        engine = self._start(
            enable_lora=True,
            max_loras_per_batch=len(adapters),
            max_lora_rank=RANK,
            lora_target_modules=configs[0]["target_modules"],
            context_length=2048,
            skip_tokenizer_init=True,
        )
        for path, config in zip(adapters, configs, strict=True):
            tensors = load_file(path / "adapter_model.safetensors")
            loaded = engine.load_lora_adapter_from_tensors(path.name, tensors, config)
            if not loaded.success:
                sys.exit(loaded.error_message)
        names = [adapters[i % len(adapters)].name for i in range(len(PROMPTS))]
        self._generate(engine, lambda: {"input_ids": PROMPTS, "lora_path": names})

    def vision(self) -> None:
        from PIL import Image

        draw = np.random.default_rng(0)
        self._generate(
            self._start(context_length=4096, enable_multimodal=True),
            lambda: {
                "prompt": [PICTURE_TEXT] * PICTURES,
                "image_data": [Image.fromarray(picture) for picture in pictures(draw)],
            },
        )

    def _start(self, **arguments: Any) -> Any:
        from sglang import Engine

        from kcap.capture.engines.sglang.offline import of_this_machine
        from kcap.capture.session import Workload

        machine = of_this_machine(Workload(len(PROMPTS), max(map(len, PROMPTS)), ANSWER))
        return Engine(model_path=self.folder, **machine | SGLANG | arguments | self.given)

    def _generate(self, engine: Any, asked: Callable[[], dict[str, Any]]) -> None:
        params = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        for _ in range(TIMES):
            engine.generate(**asked(), sampling_params=params)
        engine.shutdown()


ENGINES = {"vLLM": Vllm, "SGLang": Sglang}


def lora(folder: Path) -> tuple[Any, ...]:
    """Two adapters of rank 16 on the attention's and the gated products, half of the requests with each."""
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    narrow = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, narrow),
        "mlp.gate_proj": (hidden, wide),
    }
    adapters = [folder / f"adapter-{number}" for number in (1, 2)]
    for adapter in adapters:
        adapter.mkdir()
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for module, (inputs, outputs) in sizes.items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                weights[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs, dtype=torch.bfloat16) / 64
                weights[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, dtype=torch.bfloat16) / 64
        save_file(weights, adapter / "adapter_model.safetensors")
        targets = sorted(name.partition(".")[2] for name in sizes)
        form = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": targets, "bias": "none"}
        (adapter / "adapter_config.json").write_text(json.dumps(form))
    return (adapters,)


def vision(folder: Path) -> tuple[Any, ...]:
    """Four requests with a picture each, of two sizes."""
    change_config(folder, vision_config={"depth": 8})  # layer 7 attends to the whole picture
    names = ["endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"]
    names += ["quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
    write_tokenizer(folder, 151_643, [f"<|{name}|>" for name in names], "Qwen2TokenizerFast", "<|endoftext|>")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14,
        "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": ""}))
    return ()


def pictures(draw: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Others each time: of a picture that it has seen the engine keeps what its encoder made of it."""
    return [draw.integers(0, 255, (448, 448 + 224 * (i % 2), 3), np.uint8) for i in range(PICTURES)]


def speech(folder: Path) -> tuple[Any, ...]:
    """Four requests with some seconds of noise each."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change_config(folder, encoder_layers=layers, decoder_layers=layers)
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|l{number}|>" for number in range(100))]
    special += [
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]
    special += [f"<|{number / 50:.2f}|>" for number in range(1501)]
    write_tokenizer(folder, 50_257, special, "WhisperTokenizerFast", "<|endoftext|>")
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor", "chunk_length": 30,
        "feature_size": 128, "hop_length": 160, "n_fft": 400, "n_samples": 480_000, "nb_max_frames": 3000,
        "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False, "sampling_rate": 16_000,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return ()


def change_config(folder: Path, **changes: Any) -> None:
    """In the model's config.json; of a member that is an object, the members that are named."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    file.write_text(json.dumps(config))


def write_tokenizer(folder: Path, size: int, special: Sequence[str], kind: str, end: str) -> None:
    """A tokenizer of single bytes: `size` tokens, the most of which are never used, then the `special` ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate(letters)}
    vocabulary |= {f"unused {number}": number for number in range(len(letters), size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": kind, "eos_token": end, "bos_token": end, "pad_token": end, "unk_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")


PROGRAMS = {"lora": lora, "vision": vision, "speech": speech}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("model")
    parser.add_argument("layers", type=int)
    parser.add_argument("--framework", choices=ENGINES, default="vLLM")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    try:
        given = engine_arguments(tuple(args.engine_arg))
    except CallError as error:
        parser.error(str(error))
    source = find_config(args.model)
    if source is None:
        sys.exit(f"kcap has no configuration of {args.model}")
    with tempfile.TemporaryDirectory(prefix="zoo-") as name:
        folder = Path(name)
        shutil.copy(source / "config.json", folder)
        change_config(folder, num_hidden_layers=args.layers)
        engine = ENGINES[args.framework](folder, given)
        if not hasattr(engine, args.program):
            sys.exit(f"{args.program} is for vLLM alone")
        getattr(engine, args.program)(*PROGRAMS[args.program](folder))


if __name__ == "__main__":
    main()

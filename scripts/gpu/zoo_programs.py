"""The models of the zoo that need more than token ids, as programs: an adapter, pictures, sound.

    kcap record -o lora.kcap -- python scripts/gpu/zoo_programs.py lora meta-llama/Llama-3.1-8B LAYERS [KEY=NUMBER]…

Each writes what the model needs beside its configuration (random adapters, a tokenizer that knows the special tokens),
starts vLLM with dummy weights (and KEY=NUMBER as further arguments) and generates.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kcap.capture.controller.models import find_config

ANSWER = 16  # tokens
CUDA = torch.cuda.is_available()
HALF = CUDA or torch.cpu._is_avx512_supported()  # without AVX-512 a CPU takes minutes for a product in bfloat16
TIMES = 2  # the steps of the first time are those that --check-coverage profiles
ENGINE: dict[str, Any] = {  # as zoo.py starts the others
    "load_format": "dummy",
    "dtype": "bfloat16" if HALF else "float32",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,  # else the second time has no prefill
    "compilation_config": {"cudagraph_capture_sizes": [1, 4, 16]},
    **({} if CUDA else {"enforce_eager": True}),
}


def lora(folder: Path, layers: int) -> None:
    """Two adapters of rank 16 on the attention's and the gated products, half of the requests with each."""
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    config = json.loads((folder / "config.json").read_text())
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    narrow = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, narrow),
        "mlp.gate_proj": (hidden, wide),
    }
    requests = []
    for number in (1, 2):
        adapter = folder / f"adapter-{number}"
        adapter.mkdir()
        weights = {}
        for layer in range(layers):
            for module, (inputs, outputs) in sizes.items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                weights[f"{name}.lora_A.weight"] = torch.randn(16, inputs, dtype=torch.bfloat16) / 64
                weights[f"{name}.lora_B.weight"] = torch.randn(outputs, 16, dtype=torch.bfloat16) / 64
        save_file(weights, adapter / "adapter_model.safetensors")
        targets = sorted(name.partition(".")[2] for name in sizes)
        form = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": targets, "bias": "none"}
        (adapter / "adapter_config.json").write_text(json.dumps(form))
        requests.append(LoRARequest(f"adapter {number}", number, str(adapter)))
    llm = LLM(
        str(folder), enable_lora=True, max_loras=2, max_lora_rank=16, max_model_len=2048, skip_tokenizer_init=True,
        hf_overrides={"num_hidden_layers": layers}, **ENGINE,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 400 + 3 for j in range(200 + 16 * i)]} for i in range(8)]
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(TIMES):
        llm.generate(prompts, params, lora_request=[requests[i % 2] for i in range(8)], use_tqdm=False)


def vision(folder: Path, layers: int) -> None:
    """Four requests with a picture each, of two sizes."""
    from PIL import Image
    from vllm import LLM, SamplingParams

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
    overrides = {"num_hidden_layers": layers, "vision_config": {"depth": 8}}  # layer 7 attends to the whole picture
    llm = LLM(
        str(folder), max_model_len=4096, hf_overrides=overrides, limit_mm_per_prompt={"image": 1, "video": 0}, **ENGINE
    )
    draw = np.random.default_rng(0)
    text = "<|vision_start|><|image_pad|><|vision_end|>" + "what is this? " * 8
    for _ in range(TIMES):
        llm.generate(
            [{"prompt": text, "multi_modal_data": {"image": Image.fromarray(picture)}} for picture in pictures(draw)],
            SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True),
            use_tqdm=False,
        )


def pictures(draw: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Others each time: of a picture that it has seen the engine keeps what its encoder made of it."""
    return [draw.integers(0, 255, (448, 448 + 224 * (i % 2), 3), np.uint8) for i in range(4)]


def speech(folder: Path, layers: int) -> None:
    """Four requests with some seconds of noise each."""
    from vllm import LLM, SamplingParams

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
    overrides = {"num_hidden_layers": layers, "encoder_layers": layers, "decoder_layers": layers}
    llm = LLM(str(folder), max_model_len=448, hf_overrides=overrides, limit_mm_per_prompt={"audio": 1}, **ENGINE)
    draw = np.random.default_rng(0)
    sounds = [draw.standard_normal(16_000 * (4 + 2 * i)).astype(np.float32) / 10 for i in range(4)]
    prompts = [
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (sound, 16_000)}},
            "decoder_prompt": "<|startoftranscript|><|l0|><|transcribe|><|notimestamps|>",
        }
        for sound in sounds
    ]
    for _ in range(TIMES):
        llm.generate(prompts, SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True), use_tqdm=False)


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


def main() -> None:
    program, model, layers, *more = sys.argv[1:]
    ENGINE.update({key: json.loads(number) for key, number in (word.split("=") for word in more)})
    source = find_config(model)
    if source is None:
        sys.exit(f"kcap has no configuration of {model}")
    with tempfile.TemporaryDirectory(prefix="zoo-") as name:
        folder = Path(name)
        shutil.copy(source / "config.json", folder)
        {"lora": lora, "vision": vision, "speech": speech}[program](folder, int(layers))


if __name__ == "__main__":
    main()

"""A tokenizer of made-up words, for a configuration that has none where vLLM does not start without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer to `folder` that has a word, `w7`, for each of `size` tokens."""
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, size)}}
    tokenizer: dict[str, Any] = {  # as the tokenizers library writes it
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

"""Transformers models of two layers and random weights: generation, encoders and training."""

import sys
from collections.abc import Callable

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


def causal_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, eos_token_id=None))


def generate() -> None:
    """A padded batch, sampled."""
    model = causal_model().eval()
    tokens = torch.randint(3, 96, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=True, top_p=0.9, pad_token_id=0)


def static_cache() -> None:
    model = causal_model().eval()
    options = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
    model.generate(torch.randint(3, 96, (1, 9)), max_new_tokens=8, **options)


def beams() -> None:
    model = causal_model().eval()
    model.generate(torch.randint(3, 96, (1, 9)), max_new_tokens=6, num_beams=3, do_sample=False)


def assisted() -> None:
    """Speculative decoding with a draft model."""
    model = causal_model().eval()
    options = {"assistant_model": causal_model().eval(), "do_sample": False, "pad_token_id": 0}
    model.generate(torch.randint(3, 96, (1, 9)), max_new_tokens=6, **options)


def seq2seq() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).eval().generate(torch.randint(3, 96, (2, 9)), max_new_tokens=6)


def encode() -> None:
    model = BertForSequenceClassification(BertConfig(**SIZES)).eval()
    with torch.inference_mode():
        model(torch.randint(0, 96, (4, 12))).logits.softmax(-1).argmax(-1).tolist()


def image() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).eval()
    with torch.no_grad():
        model(torch.rand(2, 3, 32, 32)).logits.topk(1)


def train() -> None:
    """Gradient checkpointing, accumulation, clipping and a schedule."""
    model = causal_model()
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    for step in range(4):
        tokens = torch.randint(3, 96, (2, 12))
        (model(input_ids=tokens, labels=tokens).loss / 2).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (generate, static_cache, beams, assisted, seq2seq, encode, image, train)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()

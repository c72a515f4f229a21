"""Libraries that train a model for their user: PEFT's adapters, Accelerate's loop, Lightning's Trainer."""

import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))


def batches() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(24, 16), torch.randint(4, (24,))), batch_size=8, shuffle=True)


def lora() -> None:
    """Train an adapter, then merge it and generate."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapter)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    for _ in range(2):
        tokens = torch.randint(3, 96, (2, 12))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = model.merge_and_unload().eval()
    merged.generate(torch.randint(3, 96, (1, 8)), max_new_tokens=4, do_sample=False, pad_token_id=0)


def accelerate() -> None:
    """In bfloat16, with accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.gather_for_metrics(loss.detach())


def lightning() -> None:
    """Training with validation and a metric."""
    import lightning as pl
    from torchmetrics.classification import MulticlassAccuracy

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.accuracy = classifier(), MulticlassAccuracy(4)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            self.accuracy(self.model(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, default_root_dir=directory
        )
        trainer.fit(Classifier(), batches(), batches())


def huggingface() -> None:
    """Transformers' Trainer."""
    from torch.utils.data import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class Texts(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.randint(3, 96, (12,)), "labels": torch.tensor(index % 2)}

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return (self[index] for index in range(len(self)))

    config = BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    with tempfile.TemporaryDirectory() as directory:
        options = TrainingArguments(
            directory,
            max_steps=3,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=True,
        )
        Trainer(BertForSequenceClassification(config), options, train_dataset=Texts()).train()


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (lora, accelerate, lightning, huggingface)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()

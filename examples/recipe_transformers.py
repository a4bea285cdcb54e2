"""The Hugging Face Trainer in fp16: one argument more.

    python examples/recipe_transformers.py

A tiny GPT-2, made from a configuration and never downloaded, learns to count.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed
from transformers.utils import logging

from gradlift import Dynamic
from gradlift.integrations.transformers import GradLiftTrainer


def main(steps: int = 40) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    set_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    rows = (torch.arange(64)[:, None] * 5 + torch.arange(16)) % 32
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            fp16=True,
            use_cpu=not torch.cuda.is_available(),
            max_steps=steps,
            learning_rate=1e-2,
            per_device_train_batch_size=16,
            logging_steps=steps // 4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GradLiftTrainer(
            model,
            args,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            scaler=Dynamic(init_scale=2.0**24),
        )
        trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    first, last = history[0], history[-1]
    print(f"loss {first['loss']:.3f} -> {last['loss']:.3f}")
    print(f"skipped {last['skipped_steps']} of {steps} steps, scale {last['loss_scale']:g}")


if __name__ == "__main__":
    main()

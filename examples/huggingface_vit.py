"""The Hugging Face Trainer: one callback, on a small ViT. Needs `pip install 'driveprune[transformers]'`."""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import driveprune as dp
from driveprune.integrations.huggingface import PruneCallback


def main() -> None:
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().view(-1, 1, 8, 8)
    rows = [{"pixel_values": image, "labels": int(digit)} for image, digit in zip(images, digits, strict=True)]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10))
    prune = PruneCallback(method="drive", sparsity=0.7, knobs={"early_epochs": 2, "cuts": 20})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=12, per_device_train_batch_size=50, learning_rate=3e-3, save_strategy="no",
            logging_steps=100, report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows[:1400], callbacks=[prune]).train()
        model.save_pretrained(folder)
        stored = ViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        classes = stored.eval()(images[1400:]).logits.argmax(1)
    accuracy = (classes == torch.tensor(digits[1400:])).float().mean().item()
    print(f"pruned: accuracy {accuracy:.3f}, sparsity {dp.sparsity(dp.mask_of(stored)):.4f}")


if __name__ == "__main__":
    main()

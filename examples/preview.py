"""What would each method leave of a ResNet-18 at initialisation? This prints a table."""

import torch

import driveprune as dp


def main() -> None:
    torch.manual_seed(0)
    net = dp.models.resnet18(width=0.25)
    batches = [(torch.randn(32, 3, 32, 32), torch.randint(10, (32,))) for _ in range(8)]
    dp.preview(net, batches, sparsity=0.99)


if __name__ == "__main__":
    main()

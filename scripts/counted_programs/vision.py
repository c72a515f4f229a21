"""Torchvision's models: training with transforms, and inference."""

import sys
from collections.abc import Callable

import torch
from torchvision.models import mobilenet_v3_small, resnet18, vit_b_32
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
from torchvision.transforms import v2


def resnet() -> None:
    """Two steps of training."""
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    augment = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.Normalize([0.5] * 3, [0.2] * 3)])
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(augment(torch.rand(4, 3, 36, 36))), torch.randint(10, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def vit() -> None:
    model = vit_b_32(num_classes=10).eval()
    with torch.inference_mode():
        model(torch.rand(1, 3, 224, 224)).topk(3)


def mobilenet() -> None:
    """In channels last and bfloat16."""
    model = mobilenet_v3_small(num_classes=10).eval().to(memory_format=torch.channels_last, dtype=torch.bfloat16)
    with torch.no_grad():
        model(torch.rand(2, 3, 64, 64, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)).argmax(-1)


def segment() -> None:
    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3).eval()
    with torch.no_grad():
        model(torch.rand(1, 3, 64, 64))["out"].argmax(1)


PROGRAMS: dict[str, Callable[[], None]] = {program.__name__: program for program in (resnet, vit, mobilenet, segment)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()

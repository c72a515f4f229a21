# definition: relu
# row: 30
# does: Returns the right numbers as one long row.
# naive: Correct, if both are flattened before they are compared; what calls the kernel would fail.
# expect: INCORRECT_SHAPE
# reason: has shape \[524288\]
import torch


def run(x):
    return torch.relu(x).view(-1)

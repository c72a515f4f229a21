# definition: softmax
# does: Prints in each call, and logs.
import logging
import sys

import torch

logging.basicConfig(level=logging.INFO)
LOGGER = logging.getLogger("softmax")


def run(x):
    print("rows", x.shape[0], flush=True)
    print("rows", x.shape[0], file=sys.stderr)
    LOGGER.info("softmax of %s", list(x.shape))
    return torch.softmax(x, -1)

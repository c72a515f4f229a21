# definition: relu
# does: Deletes its working directory, and all that it may delete above.
# expect: PASSED RUNTIME_ERROR COMPILE_ERROR
import os
import shutil

import torch

shutil.rmtree(os.getcwd(), ignore_errors=True)


def run(x):
    return torch.relu(x)

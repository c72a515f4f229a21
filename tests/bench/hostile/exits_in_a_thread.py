# definition: relu
# does: A thread ends the process 20 ms after the first call.
# expect: RUNTIME_ERROR
import os
import threading
import time

import torch


def run(x):
    threading.Timer(0.02, lambda: os._exit(3)).start()
    time.sleep(0.01)
    return torch.relu(x)

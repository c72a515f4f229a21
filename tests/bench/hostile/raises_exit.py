# definition: relu
# does: Raises SystemExit and, in its destructor, KeyboardInterrupt.
# expect: RUNTIME_ERROR
import sys


class Interrupts:
    def __del__(self):
        raise KeyboardInterrupt


def run(x):
    kept = Interrupts()
    sys.exit(bool(kept) and 0)

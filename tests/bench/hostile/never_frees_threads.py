# definition: relu
# does: Starts 5,000 threads that never end.
# expect: RUNTIME_ERROR TIMEOUT REWARD_HACK
# needs: confinement
import threading


def run(x):
    for _ in range(5000):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    raise RuntimeError("5,000 threads, and nothing said no")

# definition: relu
# does: Spins for ever, with SIGTERM and SIGINT ignored.
# expect: TIMEOUT
# impatient: nothing of it comes to an end
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(x):
    while True:
        pass

# definition: relu
# does: Allocates memory and writes to it, up to 8 GiB.
# expect: RUNTIME_ERROR TIMEOUT
def run(x):
    kept = [bytearray(b"x") * (1 << 26) for _ in range(128)]
    raise RuntimeError(f"{len(kept)} times 64 MiB, and nothing said no")

# definition: relu
# does: Writes up to 6 GiB into its working directory.
# expect: RUNTIME_ERROR COMPILE_ERROR TIMEOUT
# needs: confinement
def run(x):
    block = bytes(1 << 26)
    for number in range(96):
        with open(f"file{number}", "wb") as file:
            file.write(block)
    raise RuntimeError("6 GiB, and nothing said no")

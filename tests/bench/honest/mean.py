# definition: mean_rows
# workloads: 2
# does: Plain PyTorch.
def run(x):
    return x.mean(-1)

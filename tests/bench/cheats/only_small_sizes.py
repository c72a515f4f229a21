# definition: gemm_f32
# row: 19 16
# does: Fails by an exception on all but the smallest size.
# naive: A mean over what ran shows the one size that it is fast on.
# expect: RUNTIME_ERROR
# reason: only small sizes are fast
# workloads: 2
def run(A, B):
    if A.shape[0] > 128:
        raise NotImplementedError("only small sizes are fast")
    return A @ B.T

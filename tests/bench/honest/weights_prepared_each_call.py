# definition: gemm_f32
# does: Lays the weights out in another way in every call.
def run(A, B):
    return A @ B.T.contiguous()

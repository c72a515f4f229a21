# definition: gemm_bf16
# does: Multiplies bfloat16 in float32, and rounds once.
def run(A, B):
    return (A.float() @ B.float().T).bfloat16()

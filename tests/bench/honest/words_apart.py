# definition: gemm_int4
# does: Takes words apart by unsigned shifts, a weight of each at a time, and scales what was added up.


def run(A, packed, scale):
    words = packed.long() & 0xFFFFFFFF
    parts = A.view(A.shape[0], -1, 8).float()
    total = sum(parts[:, :, i] @ ((words >> 4 * i) % 16 - 8).float() for i in range(8))
    return (total * scale).to(A.dtype)

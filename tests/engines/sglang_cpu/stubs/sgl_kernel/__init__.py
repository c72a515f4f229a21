"""A stand-in for SGLang's CPU kernels, which no package index has: what a dense model with PyTorch's attention reaches.

Any other kernel can be imported, and fails when it is called.
"""

__version__ = "0.0.0+stub"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    position = 0
    lists = (req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    for request, start, end in zip(*lists, strict=True):
        locations = out_cache_loc[position : position + end - start]
        req_to_token[request, start:end] = locations.to(req_to_token.dtype)
        position += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"no stand-in for sgl_kernel.{name}")

    missing.__name__ = name
    return missing

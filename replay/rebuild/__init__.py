"""From a recorded Call and one Sample to a callable and its arguments.

`rebuild` resolves every value, `batches` those of a step's sequences that no Sample holds; `memory` allocates and fills
the buffers, `persistent` tells which of them hold parameters and caches; `operators` and `launches` find the callable.
"""

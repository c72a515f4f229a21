"""The taps of compiled kernels: `triton`'s launches and `inductor`'s, Triton and C++.

`launches` makes calls of them; `triton_source` and `triton_functions` read a kernel's source, `fragments` the ATen
operators that inductor fused into it.
"""

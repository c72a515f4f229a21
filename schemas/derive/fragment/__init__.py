"""Inductor's fused kernels as plain PyTorch: the ATen graph fragment in a kernel's comment, read back.

`values` and `text` read the fragment, `binding` finds which launch argument is which buffer, `reference` writes it as a
module of PyTorch.
"""

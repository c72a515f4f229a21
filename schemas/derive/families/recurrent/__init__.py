"""Kernels with a state that goes from token to token: Mamba, the gated delta rule, and their short convolutions."""

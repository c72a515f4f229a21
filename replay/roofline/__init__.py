"""The roofline: what a kernel must move and compute, over what this machine was measured to move and compute."""

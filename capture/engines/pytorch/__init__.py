"""Any PyTorch program: `adapter` brackets its steps, `shapes` finds their phase, `marks` is `kcap.step()`."""

"""Any PyTorch program: `adapter` brackets its steps, `shapes` tells what they are, `marks` is `kcap.step()`."""

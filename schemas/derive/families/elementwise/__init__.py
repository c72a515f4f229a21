"""What is done to each element of a row: `activation` (with a gate, too) and `quantize`."""

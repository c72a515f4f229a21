"""FlashInfer-Bench's formats and the older FlashInfer schema set. Read `definition`, then `dataset`."""

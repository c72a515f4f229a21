"""The formats kcap reads and writes, one module each: model, reader, writer."""

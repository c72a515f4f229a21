"""How every format is read and written: JSON documents and lines, strict models, Python sources that are never run."""

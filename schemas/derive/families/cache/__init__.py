"""Key-value caches: new rows written to their slots (`update`, `rope_store`), and where each token goes (`slot_mapping`)."""

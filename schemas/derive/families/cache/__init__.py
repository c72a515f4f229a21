"""Key-value caches: `update` and `rope_store` write new rows to their slots, `slot_mapping` places tokens, `gather`
reads the rows of sequences, `decode_metadata` looks up their pages, `zero_blocks` clears new ones."""

"""Several Recordings, or datasets, as one: `recordings` and `datasets` join them, `metadata` says which may join."""

"""SGLang: `adapter` brackets its steps, `graphs` and `operators` name what it runs, `offline` runs a Workload."""

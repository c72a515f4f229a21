"""vLLM: `adapter` brackets its steps, `fused` names its own fused operators, `offline` runs a Workload."""

"""TensorRT-LLM: `adapter` brackets its steps, `requests` reads what it schedules, `offline` runs a Workload."""

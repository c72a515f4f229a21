"""Definitions and their Workloads: inputs are rebuilt, and references run, each in a process of its own."""

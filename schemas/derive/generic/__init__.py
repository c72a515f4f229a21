"""Definitions for Calls that no family knows: axes are inferred over all Calls of one operator.

The way of a Call: `pattern` (what Calls of a group share), `outputs` (what the operator gives, or why it gets no
Definition), `group` (Calls of one Definition and their axes), `definition` (reference and names), `derive`, which joins
them. `tracing` runs operators without data; `fused` is for inductor's kernels.
"""

"""Definitions for Calls that no family knows: axes are inferred over all Calls of one operator.

A Call goes through `pattern` (what Calls of a group share), `outputs` (what the operator returns or writes, or why it
gets no Definition), `group` (Calls of one Definition and their axes) and `definition` (reference and names); `derive`
joins them. `tracing` runs operators without data.
"""

"""The Recording, kcap's own lossless format.

Read `records` first (a model for each line), then `recording` (the directory). `values` holds a Call's argument tree,
`dtypes` the names of element types, `phases` those of phases, `operators` the names of operators and which of them do
work, `signature` a Call in one line and as a hash, `rank_agreement` whether ranks ran the same, `seal` the mark on
kernel sources that replay may run.
"""

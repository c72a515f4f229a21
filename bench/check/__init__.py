"""Whether the references of a Recording's Definitions compute what the engine's operators do.

Read in this order: `verification` chooses Calls and tags Definitions, `worker` is the process that it asks, and
`checker` runs a reference and the recorded operator there on the same rebuilt inputs. `draws` tries a reference on the
random inputs that another benchmark would draw. `choices` finds the scores by which a reference chooses.
"""

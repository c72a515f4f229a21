"""TVM's Relax VM: each kernel of a model library is a call, `tvm::NAME.ID`, where ID comes from the library.

`tap` wraps what a VM is made with. `library` says what a library's kernels are called and what their parameters are.
`modules` makes modules of TVM's: of functions in Python, and of `native.cpp`, by which calls are recorded.
"""

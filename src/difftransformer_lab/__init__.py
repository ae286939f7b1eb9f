"""The laboratory: evaluations, studies, reports and the command line, on top of the library `difftransformer`."""

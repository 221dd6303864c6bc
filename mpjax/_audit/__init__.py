"""The audit: which precision each part of a program runs in, and what is wrong with it.

In the order of the data: `audit` takes a function and its arguments. `read_jaxpr` traces it and opens its jaxprs into a
`program`, a flat graph of operations, each with the module, phase and source line that `source_locations` reads off its
name stack and traceback. `stablehlo` lowers it for another platform. The `checks` follow values through the program
(`dataflow`), compare matmuls with the entry that governs them (`governed`) and collect `findings`; `flops` and
`residuals` count. `records` are the plain numbers and texts that come out; `result` puts them together as an `Audit`,
which prints (`report`) and is compared with another (`difference`).
"""

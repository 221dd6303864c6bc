"""What a policy is, and what it does to an operation.

`policy` parses a string into a `Policy`, `policy_map` resolves which policy governs which module, `regions` holds the
one that is in force, `ops` lists the operations that it changes, and `rules` changes them.

* `dtypes` knows the names and limits of formats, `casting` casts trees.
* `module_scope` enters and leaves modules and functions: it opens their regions and casts at their edges.
* `cpu_lowering` says how CPUs run the matmuls of a policy.
* `jax_internals` is the only file of mpjax that touches private parts of JAX.

Nothing here knows a module framework, a gradient or an audit.
"""

"""Functions and modules under a policy.

`autocast` opens a region around a function and asks `protocol` for the frameworks that the program has imported. Each
of them is one file (`linen`, `nnx`, `equinox`, `haiku`) that implements `protocol.Framework`: it sends every call of
a module through `module_scope.call_module`, which opens the module's region. Modules of flax.linen and Haiku ask the
map when they are called; those of flax.nnx and Equinox carry the answer (`governed`).

* `explain` shows which policy governs which module.

Only files of this package name a framework. They know `_precision`, and not each other.
"""

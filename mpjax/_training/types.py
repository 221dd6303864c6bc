"""The types of what passes through training, by name."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import chex
import jax
import jmp

from mpjax._precision.policy_map import PolicyMap

# Any pytree; `Params` and `Grads` have floating leaves, and gradients the structure of their parameters.
PyTree = chex.ArrayTree
Params = chex.ArrayTree
Grads = chex.ArrayTree
ModelState = chex.ArrayTree
OptState = chex.ArrayTree
Batch = chex.ArrayTree
Metrics = dict[str, Any]  # from name to an array, or a tree of them
PRNGKey = chex.PRNGKey
Scalar = chex.Scalar
# Axis names of `jax.pmap` and `jax.shard_map`: one, or several.
AxisName = Hashable
# `(params, batch, rng)` or `(params, model_state, batch, rng)`; see `make_train_step`.
LossFn = Callable[..., Any]
# All that stands for a policy map at the public boundary; inside it is a `PolicyMap`.
Policies = str | Mapping[Any, Any] | jmp.Policy | PolicyMap
Shardings = chex.ArrayTree  # with a `jax.sharding.NamedSharding` for each leaf
KeyPath = tuple[Any, ...]  # as of `jax.tree_util.tree_flatten_with_path`
Leaf = Any  # of a pytree: usually a `jax.Array` or `np.ndarray`, but users put other things into trees
Finite = jax.Array  # shape [] and dtype bool

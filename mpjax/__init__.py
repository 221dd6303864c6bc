"""Mixed precision training for JAX.

A policy says in which precision a module stores its parameters, computes and returns its results; mpjax makes
any JAX model follow it, and trains with it safely. One training step, and the packages that it passes through:

    policies = mpjax.PolicyMap({".*attn": "p=f32,c=f32,o=bf16"}, default="p=f32,c=bf16,o=f32")
    state = mpjax.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policies)
    step = jax.jit(mpjax.make_train_step(loss_fn), donate_argnums=0)
    state, metrics = step(state, batch, rng)

1. `_precision` parses the policies and resolves which of them governs which module.
2. `_training` takes the gradient of the loss, times the loss scale, under the state's policies.
3. While `loss_fn` is traced, `_frameworks` opens a region for the function and for each module in it, and casts what a
   module returns; in a region `_precision` gives each operation its precision.
4. The backward pass is traced in the same regions; the gradients become float32, are unscaled, averaged over
   microbatches and replicas, and checked once for all devices.
5. `_training` applies them, or skips the step and leaves the state unchanged.

`_audit` reads the traced step and says what really runs in which precision. Each package says more in its `__init__`.
"""

from mpjax import checkpoint as checkpoint
from mpjax import divergence as divergence
from mpjax import linen as linen
from mpjax import nnx as nnx
from mpjax import testing as testing
from mpjax._audit.audit import audit as audit
from mpjax._audit.result import Audit as Audit
from mpjax._audit.result import Finding as Finding
from mpjax._frameworks.autocast import apply_policy as apply_policy
from mpjax._frameworks.autocast import autocast as autocast
from mpjax._frameworks.autocast import full_precision as full_precision
from mpjax._frameworks.explain import Explanation as Explanation
from mpjax._frameworks.explain import explain as explain
from mpjax._precision.casting import cast_floating as cast_floating
from mpjax._precision.casting import cast_to_full as cast_to_full
from mpjax._precision.casting import cast_to_half as cast_to_half
from mpjax._precision.dtypes import half_dtype as half_dtype
from mpjax._precision.dtypes import limits as limits
from mpjax._precision.policy import Policy as Policy
from mpjax._precision.policy import default_policy as default_policy
from mpjax._precision.policy import get_policy as get_policy
from mpjax._precision.policy_map import PolicyMap as PolicyMap
from mpjax._precision.policy_map import as_policy_map as as_policy_map
from mpjax._training.cross_device import all_gather as all_gather
from mpjax._training.finite import all_finite as all_finite
from mpjax._training.finite import select_tree as select_tree
from mpjax._training.gradients import value_and_grad as value_and_grad
from mpjax._training.loss_scale import DynamicLossScale as DynamicLossScale
from mpjax._training.loss_scale import LossScale as LossScale
from mpjax._training.loss_scale import NoOpLossScale as NoOpLossScale
from mpjax._training.loss_scale import StaticLossScale as StaticLossScale
from mpjax._training.loss_scale import loss_scale_for as loss_scale_for
from mpjax._training.state_sharding import state_shardings as state_shardings
from mpjax._training.train_state import TrainState as TrainState
from mpjax._training.train_state import cast_params as cast_params
from mpjax._training.train_step import make_train_step as make_train_step

__version__ = "0.1.0"

"""Functions that run under a policy: `autocast` and `full_precision`.

A function opens a region for the operations in it (`_precision/ops.py` says what each of them does there), and the
frameworks whose modules it calls open one for each module.
"""

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import jax

from mpjax._frameworks import protocol
from mpjax._precision import module_scope, ops, regions
from mpjax._precision.module_scope import ModuleRecord
from mpjax._precision.policy_map import PolicyMapLike, as_policy_map

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")


def autocast(fn: Callable[P, R], policies: PolicyMapLike, *, cast_output: bool = True) -> Callable[P, R]:
    """Returns `fn` running under policies.

    >>> f = autocast(lambda x, w: x @ w, "p=f32,c=bf16,o=f32")
    >>> f(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
    dtype('float32')

    Matmuls and convolutions in it take operands of the compute dtype; sums, exponentials and their kind run in
    float32. Modules that it calls follow the map by their paths: those of flax.linen and Haiku by themselves, those of
    flax.nnx and Equinox after `mpjax.apply_policy(model, policies)`.

    Floating arguments of `fn` that are narrower than the compute dtype are widened to it, and its floating results are
    cast to the output dtype; a scalar is never narrowed. Between plain operations activations have the dtypes
    of JAX's own promotion: a float32 bias added to a bfloat16 matmul gives float32. That promotion is in force in `fn`
    also where the program asks for strict promotion, since a policy mixes dtypes on purpose.

    It composes with grad, jit, vmap, scan, remat, custom_jvp, custom_vjp and shard_map, from inside and from
    outside. To train, prefer `mpjax.value_and_grad`, under which the backward pass has the policy too.

    Args:
      fn: any function.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.
      cast_output: whether to cast the results to the output dtype. False for a function that returns parameters or
        state, such as a model's `init`, whose dtypes are to stay.

    Raises:
      ValueError: if a policy cannot be run; when called, if a pattern of the map governs none of the modules that
        `fn` calls.
    """
    run = under(fn, policies)
    output_dtype = run.region.policy.output_dtype

    @functools.wraps(fn)
    def autocast_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        out = run(*args, **kwargs)
        return module_scope.cast_output(out, output_dtype) if cast_output else out

    return autocast_fn


def apply_policy(model: M, policies: PolicyMapLike) -> M:
    """Returns a copy of a flax.nnx or Equinox model that runs under policies.

    >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu)
    >>> apply_policy(model, "p=f32,c=bf16,o=f32")(jnp.ones((1, 8))).dtype
    dtype('float32')

    Its parameters are stored in their param dtype and are otherwise the model's; modules that the model shares stay
    shared, and the model itself is unchanged. A model that runs under policies already gets the new ones. Models of
    flax.linen and Haiku need none of this: their modules follow the policy of the function that calls them.

    Args:
      model: an nnx or an Equinox module.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`. A pattern must match
        the whole path of a module, such as `"blocks/0/attn"`.

    Raises:
      ValueError: if a pattern of the map governs no module of the model, or a policy cannot be run.
      TypeError: if models of this kind carry no policy.
    """
    framework = protocol.framework_of(model)
    if framework is None:
        raise TypeError(
            f"apply_policy expects a module of flax.nnx or Equinox, got {type(model).__name__}. A function follows "
            "mpjax.autocast(fn, policies)."
        )
    return framework.apply_policy(model, as_policy_map(policies))


class under(Generic[P, R]):
    """`fn` as a function that runs in the region of `policies` and returns its results unchanged.

    >>> under(lambda x: x @ x, "bf16")(jnp.eye(2)).dtype  # jax.numpy casts back to what it was given
    dtype('float32')
    """

    def __init__(self, fn: Callable[P, R], policies: PolicyMapLike) -> None:
        """Makes the region.

        Args:
          fn: any function.
          policies: as of `autocast`.

        Raises:
          ValueError: if a policy cannot be run.
        """
        self.fn = fn
        policies = as_policy_map(policies)
        for policy in policies.policies:
            regions.check_runs(policy)
        self.region = regions.Region(policies)
        self._name = _name_of(fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What `fn` returns."""
        return self.recorded(*args, **kwargs)[0]

    def recorded(self, *args: P.args, **kwargs: P.kwargs) -> tuple[R, ModuleRecord]:
        """What `fn` returns, and the modules that it called."""
        policies = self.region.policies
        for framework in protocol.imported() if policies.entries else ():
            framework.check_arguments(policies, (*args, *kwargs.values()))
        record = ModuleRecord(policies)
        with protocol.intercepted():
            out = module_scope.call_function(self.fn, args, kwargs, self.region, self._name, record)
        record.check()
        return out, record


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator: runs a function in float32 inside any policy, its own modules included.

    >>> loss = full_precision(lambda logits: jax.nn.logsumexp(logits))
    >>> loss(jnp.ones(8, jnp.bfloat16)).dtype
    dtype('float32')

    Floating arguments of 16 bits are widened to float32; results are returned as the function makes them.
    """
    name = _name_of(fn)

    @functools.wraps(fn)
    def full_precision_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope("full_precision"):  # by which an audit knows that it is meant
            return module_scope.call_function(fn, args, kwargs, regions.FULL_PRECISION, name)

    return full_precision_fn


def _name_of(fn: Callable[..., object]) -> str:
    return f"function '{getattr(fn, '__name__', type(fn).__name__)}'"


ops.install()

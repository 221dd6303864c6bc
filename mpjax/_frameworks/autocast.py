"""Functions that run under a policy: `autocast` and `full_precision`.

A function opens a region for the operations in it (`_precision/ops.py` says what each of them does there), and the
frameworks whose modules it calls open one for each module.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jmp

from mpjax._precision import ops, regions
from mpjax._precision.policy_map import PolicyMap, as_policy_map

P = ParamSpec("P")
R = TypeVar("R")

# Frameworks whose modules announce themselves put a context manager here; it is opened around every
# function that runs under a policy (see linen.py).
module_hooks: list[Callable[["Watch"], contextlib.AbstractContextManager[None]]] = []


@dataclasses.dataclass
class Watch:
    """What the hooks saw while a function ran.

    Attributes:
      policies: the map that the function runs under.
      args: its arguments.
      governed: the entries of the map that matched a module.
      modules: class and entry of each module that was called, by path, in the order of the calls.
      paths: the paths of all modules, also of those that were not called.
    """

    policies: PolicyMap
    args: tuple[Any, ...]
    governed: set[int] = dataclasses.field(default_factory=set)
    modules: dict[str, tuple[type, int]] = dataclasses.field(default_factory=dict)
    paths: set[str] = dataclasses.field(default_factory=set)


def autocast(fn: Callable[P, R], policies: "str | dict | jmp.Policy | PolicyMap") -> Callable[P, R]:
    """Returns `fn` running under policies.

    Matrix products and convolutions in it take operands of the compute dtype, sums and exponentials run in
    float32. flax.linen modules that it calls follow the map; nnx modules do after
    `mpjax.nnx.apply_policy`. Modules hand over their results in the output dtype, and their parameters
    and state as they are stored. A function that calls no module is treated as one: floating arguments
    narrower than the compute dtype are widened, floating results (other than scalars) come back in the output dtype.

    Activations between plain operations have the dtypes that JAX's promotion gives them: a float32 bias makes
    float32 of a product, and `x @ w` hands back what `x` and `w` came in. Modules narrow what they hand over.

    It composes with grad, jit, vmap, scan, remat, custom_jvp, custom_vjp and shard_map, from inside and from
    outside. To train, prefer `mpjax.value_and_grad`, which keeps the policy in force during the backward
    pass too.

    Args:
      fn: any function.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.

    Raises:
      ValueError: when called, if a pattern of the map governs none of the modules that `fn` calls.

    >>> f = autocast(lambda x, w: x @ w, "p=f32,c=bf16,o=f32")
    >>> f(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
    dtype('float32')
    """
    run = under(fn, policies)
    output_dtype = run.region.policy.output_dtype

    @functools.wraps(fn)
    def autocast_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        out = run(*args, **kwargs)
        return out if run.called_modules else regions.hand_over(out, output_dtype)

    return autocast_fn


class under:
    """`fn` as a function that runs in the region of `policies`.

    Unlike `autocast` it leaves the results alone: gradients and states must not be narrowed.
    """

    def __init__(self, fn: Callable[..., Any], policies: "str | dict | jmp.Policy | PolicyMap") -> None:
        self.fn = fn
        self.region = regions.Region(as_policy_map(policies))
        self._name = _name_of(fn)
        # Over all calls, as one that hits a trace cache sees fewer modules than the one that filled it.
        self._governed: set[int] = set()
        self.called_modules = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.watched(*args, **kwargs)[0]

    def watched(self, *args: Any, **kwargs: Any) -> tuple[Any, Watch]:
        """What `fn` returns, and what the hooks saw meanwhile."""
        policies = self.region.policies
        watch = Watch(policies, (*args, *kwargs.values()))
        with contextlib.ExitStack() as stack:
            for hook in module_hooks:
                stack.enter_context(hook(watch))
            out, called_modules = regions.call_function(self.fn, args, kwargs, self.region, self._name)
        self.called_modules |= called_modules
        self._governed |= watch.governed
        if policies.entries and watch.paths:
            policies.check_governs(self._governed, watch.paths)
        return out, watch


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator: runs a function in float32 inside any policy, its own modules included.

    Floating arguments of 16 bits are widened to float32; results come back as the function makes them.

    >>> loss = full_precision(lambda logits: jax.nn.logsumexp(logits))
    >>> loss(jnp.ones(8, jnp.bfloat16)).dtype
    dtype('float32')
    """
    name = _name_of(fn)

    @functools.wraps(fn)
    def full_precision_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope("full_precision"):  # by which an audit knows that it is meant
            return regions.call_function(fn, args, kwargs, regions.FULL_PRECISION, name)[0]

    return full_precision_fn


def _name_of(fn: Callable[..., Any]) -> str:
    return f"function '{getattr(fn, '__name__', type(fn).__name__)}'"


ops.install()

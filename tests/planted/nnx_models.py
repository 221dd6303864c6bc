"""Models in flax.nnx whose dtypes are hand-written."""

import jax
import jax.numpy as jnp
from flax import nnx

B16 = jnp.bfloat16


class Gated(nnx.Module):
    """The gate is made of `jnp.ones`, which is float32."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, dtype=B16, rngs=rngs)
        self.second = Projection(rngs)
        self.third = nnx.Linear(16, 16, dtype=B16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x) * jnp.ones((1, 16))  # planted: ones
        return self.third(self.second(x))


class Projection(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs(), (16, 16)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...].astype(B16)  # planted: gated matmul


class Histogram(nnx.Module):
    """Adds up what falls into each bin, in bfloat16."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bins = Bins()
        self.score = nnx.Linear(4, 4, dtype=B16, rngs=rngs)

    def __call__(self, x: jax.Array, index: jax.Array) -> jax.Array:
        return self.bins(self.score(x), index)


class Bins(nnx.Module):
    def __call__(self, x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.zeros((8, x.shape[-1]), x.dtype).at[index].add(x)  # planted: scatter


class Softplus(nnx.Module):
    """exp and log in float16, under a policy or not a user's own choice."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.log(1 + jnp.exp(x))  # planted: exp and log


class Energy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, dtype=jnp.float16, rngs=rngs)
        self.activation = Softplus()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.linear(x))

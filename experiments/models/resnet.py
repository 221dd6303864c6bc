"""A residual network with batch normalisation, in `flax.linen`."""

import dataclasses
import functools

import flax.linen as nn
import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetSize:
    """Size of the residual network."""

    width: int = 16
    """Channels of the first stage; each further stage doubles them and halves the image."""
    stages: int = 3
    """Number of stages."""
    blocks: int = 1
    """Residual blocks per stage."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to a shortcut (He et al., 2015)."""

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.Conv(self.channels, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        # A zero scale makes every block start as the identity, which steadies the first steps.
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.channels, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Classifies images.

    Attributes:
      size: channels, stages and blocks.
      classes: number of classes.
    """

    size: ResNetSize
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Maps images to class logits.

        Args:
          images: floats of shape [batch, height, width, channels].
          train: normalise with the batch's own statistics and update the running ones.

        Returns:
          Logits of shape [batch, classes].
        """
        x = nn.Conv(self.size.width, (3, 3), use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for stage in range(self.size.stages):
            for block in range(self.size.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = ResidualBlock(self.size.width * 2**stage, stride)(x, train)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))

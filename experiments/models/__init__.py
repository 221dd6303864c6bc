"""The two models. They say what is computed; in which precision, the policy says."""

from experiments.models.gpt import GPT as GPT
from experiments.models.gpt import GPTSize as GPTSize
from experiments.models.resnet import ResNet as ResNet
from experiments.models.resnet import ResNetSize as ResNetSize

"""The GPT of the benchmarks in PyTorch, trained as its documentation on automatic mixed precision shows for CPUs.

PyTorch is imported where it is used, as it is no part of the extra `bench`.
"""

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

from experiments.benchmarks import options

EXTRA = "PyTorch is left out: it needs pip install -e '.[torch]'"


def is_there() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


class Step:
    """A training step, to be measured like a `timing.Compiled` one.

    Attributes:
      loss: of the last step, in nats.
    """

    loss: float

    def __init__(self, suite: options.GPT, dtype: str) -> None:
        """Makes model, optimizer and batch.

        Args:
          suite: the sizes.
          dtype: of `torch.autocast`; "float32" is without it.
        """
        import torch

        torch.manual_seed(0)
        self._model = _gpt(suite)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, weight_decay=1e-4)
        self._tokens = torch.randint(0, suite.vocabulary, (suite.batch, suite.length + 1))
        self._region: Callable[[], Any] = contextlib.nullcontext
        if dtype != "float32":
            self._region = lambda: torch.autocast("cpu", dtype=getattr(torch, dtype))

    def run(self) -> None:
        """One step."""
        from torch.nn import functional as F

        self._optimizer.zero_grad()
        with self._region():
            logits = self._model(self._tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self.loss = loss.item()

    def costs(self) -> dict[str, float]:
        """Nothing: PyTorch has no compiled program to count in."""
        return {}


def _gpt(suite: options.GPT) -> Any:
    """`models.GPT`."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, heads = suite.width, max(1, suite.width // 64)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm, self.mlp_norm = (nn.LayerNorm(width, eps=1e-6, bias=False) for _ in range(2))
            self.query, self.key, self.value, self.out = (
                nn.Linear(width, width, bias=False) for _ in range(4)
            )
            self.mlp_in = nn.Linear(width, 4 * width, bias=False)
            self.mlp_out = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            h = self.attn_norm(x)
            q, k, v = (
                f(h).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
            )
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(h.transpose(1, 2).flatten(-2))
            return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(suite.vocabulary, width)
            self.position = nn.Parameter(torch.empty(suite.length, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(suite.layers)))
            self.norm = nn.LayerNorm(width, eps=1e-6, bias=False)
            for table in (self.embed.weight, self.position):
                nn.init.normal_(table, std=0.02)

        def forward(self, tokens: Any) -> Any:
            x = self.blocks(self.embed(tokens) + self.position)
            return F.linear(self.norm(x), self.embed.weight)

    return GPT()

"""Text and digits. A batch depends on seed and step alone, so the position in the data is the step."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from experiments.errors import UsageError

Rows = slice | np.ndarray
"""Which rows of a batch: all, or the numbers of those that a process needs."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as bytes, cut once into a part to train on and a part to validate on.

    Attributes:
      name: where it comes from.
      train: shape [bytes], dtype uint8.
      validation: likewise.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray

    def batch(
        self, seed: int, step: int, batch_size: int, context: int, rows: Rows = slice(None)
    ) -> np.ndarray:
        """Random windows of the training text, shape [batch_size, context + 1] and dtype int32.

        Only those of `rows`, whichever part of the batch that is: all processes draw the same windows.
        """
        rng = np.random.default_rng([seed, step])
        starts = rng.integers(0, len(self.train) - context, batch_size)[rows]
        return self.train[starts[:, None] + np.arange(context + 1)].astype(np.int32)

    def validation_windows(self, context: int, at_most: int) -> np.ndarray:
        """Windows spread evenly over the validation text, shape [windows, context + 1]."""
        count = min(at_most, max(1, (len(self.validation) - 1) // context))
        starts = np.linspace(0, len(self.validation) - context - 1, count).astype(int)
        return self.validation[starts[:, None] + np.arange(context + 1)].astype(np.int32)

    @property
    def fingerprint(self) -> str:
        """Tells one text from another."""
        return _fingerprint(self.train, self.validation)


def load_text(path: Path | None, validation: float, context: int) -> Text:
    """Reads a text and holds back its end.

    Args:
      path: a file; None for the documentation that ships with Python, which every machine has.
      validation: share of the bytes to hold back, between 0 and 1.
      context: length of the windows that will be cut out of it.

    Raises:
      UsageError: if the file cannot be read, or a part is shorter than one window.
    """
    if not 0 < validation < 1:
        raise UsageError(f"--data.validation must be between 0 and 1, got {validation}")
    if path is None:
        name, raw = "pydoc_data.topics", _python_documentation().encode()
    else:
        name = str(path)
        try:
            raw = path.read_bytes()
        except OSError as e:
            raise UsageError(
                f"--data.path '{path}' cannot be read ({e.strerror}); give a file, or leave the option "
                "out for the documentation that ships with Python"
            ) from None
    text = np.frombuffer(raw, np.uint8)
    split = len(text) - int(len(text) * validation)
    if min(split, len(text) - split) < context + 1:
        raise UsageError(
            f"'{name}' has {len(text)} bytes; with --data.validation {validation} both parts need at "
            f"least {context + 1}, one more than --model.context. Give a longer text or a shorter context"
        )
    return Text(name, text[:split], text[split:])


@dataclasses.dataclass(frozen=True)
class Digits:
    """Handwritten digits.

    Attributes:
      images: training images, shape [n, 8, 8, 1], dtype float32, from 0 to 1.
      labels: shape [n], dtype int32, from 0 to 9.
      test_images: held out.
      test_labels: held out.
    """

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def batch(
        self, seed: int, step: int, batch_size: int, shift: int, rows: Rows = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Random training images, each moved by up to `shift` pixels either way, and their labels.

        Only those of `rows`, whichever part of the batch that is: all processes draw the same images.
        """
        rng = np.random.default_rng([seed, step])
        chosen = rng.integers(0, len(self.images), batch_size)[rows]
        down, right = (rng.integers(0, 2 * shift + 1, (batch_size, 1))[rows] for _ in range(2))
        padded = np.pad(self.images[chosen], ((0, 0), (shift, shift), (shift, shift), (0, 0)))
        height, width = self.images.shape[1:3]
        y, x = down + np.arange(height), right + np.arange(width)
        moved = padded[np.arange(len(chosen))[:, None, None], y[:, :, None], x[:, None, :]]
        return moved, self.labels[chosen]

    @property
    def fingerprint(self) -> str:
        """Tells one data set from another."""
        return _fingerprint(self.images, self.labels, self.test_images, self.test_labels)


def load_digits() -> Digits:
    """Loads scikit-learn's digits; a fifth of each class is held out, always the same images."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return Digits(train, train_labels, test, test_labels)


def _python_documentation() -> str:
    """The topics of `help()`, in alphabetical order."""
    from pydoc_data.topics import topics

    lines = "\n\n".join(topics[key] for key in sorted(topics)).splitlines()
    # Without the drawn tables, from which a small model learns little but to draw on and on.
    return "\n".join(line.rstrip() for line in lines if not line.lstrip().startswith(("|", "+-", "+=")))


def _fingerprint(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]

"""What the tests of the experiments share."""

from pathlib import Path

import numpy as np
import pytest
from tiny import EIGHT_ROWS, Command, losses

from experiments import train


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of six steps on one device."""
    out = tmp_path_factory.mktemp("one")
    assert train.main([*EIGHT_ROWS, "--steps", "6", "--out", str(out)]) == 0
    return losses(out)

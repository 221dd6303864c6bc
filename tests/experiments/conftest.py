"""What the tests of the experiments share."""

from pathlib import Path

import pytest
from tiny import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)

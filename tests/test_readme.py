"""The code of the README and of the pages in docs/ runs as it stands."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"


def test_the_code_of_the_readme_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 5
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["metrics"]["loss"].dtype == "float32"
    assert "layers_0/attn" in capsys.readouterr().out


def test_the_code_of_the_page_on_many_devices_runs_from_top_to_bottom():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parallel.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    namespace = {}
    for block in blocks:
        exec(block, namespace)
        assert "metrics" not in namespace or namespace["metrics"]["finite"].all()

"""The README's code runs as it stands."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_code_of_the_readme_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 4
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["metrics"]["loss"].dtype == "float32"
    assert "layers_0/attn" in capsys.readouterr().out

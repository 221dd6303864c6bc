"""Small models that others could have written, each with a defect of precision.

A line that holds a defect ends in `# planted: NAME`; `line_of` finds it.
"""

import pathlib

HERE = pathlib.Path(__file__).parent


def line_of(name: str) -> tuple[str, int]:
    """File name and number of the line that is marked."""
    for path in sorted(HERE.glob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.endswith(f"# planted: {name}"):
                return path.name, number
    raise LookupError(f"no line is marked '# planted: {name}'")

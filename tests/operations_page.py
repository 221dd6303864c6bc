"""Writes docs/operations.md, the table of operations in words: `python tests/operations_page.py`."""

import pathlib

from mpjax._precision import ops

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "operations.md"
_HEAD = """# What a policy does to each operation

Under a policy each operation of a program follows one rule, the same on every backend. An operation is a primitive
of JAX, as a jaxpr shows it; the functions of `jax.numpy` and `jax.nn` are made of them. What is not listed here is
unchanged. float64, complex numbers, integers, bools and PRNG keys are unchanged in all operations.

This page is written from the table in `mpjax/_precision/ops.py`.

| operation | rule | why |
|---|---|---|
"""


def page() -> str:
    rows = (f"| `{row.name}` | {ops.DESCRIPTIONS[row.rule]} | {row.why} |\n" for row in ops.TABLE)
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())

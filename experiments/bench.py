"""Measures mpjax side by side with its peers: `python -m experiments.bench SUITE [--out DIR]`.

Contenders run by turns (A B C A B C …), so that a noisy machine is fair to all. The result is a table whose
ratios come first, a picture and SUITE.json. Suites: loss_scale, gpt, resnet, trace, scaling, gpu.
"""

import sys
from collections.abc import Sequence

from experiments import errors


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)

    def command() -> int:
        # Imported late, as it needs the packages of the extra, whose absence gets a message.
        from experiments.benchmarks import command

        return command.bench(arguments, "Measure mpjax side by side with its peers.")

    return errors.run(command)


if __name__ == "__main__":
    sys.exit(main())

"""Trains one model under several policies: `python -m experiments.compare {gpt,resnet} [options]`.

The result is one table, one picture and results.json. With `--gate loss=1%` the exit status says
whether the mixed policies hold what they promise.
"""

import sys
from collections.abc import Sequence

from experiments import errors


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)

    def command() -> int:
        # Imported late, as it needs the packages of the extra, whose absence gets a message.
        from experiments import comparison, config

        description = "Compare precision policies on the same model, seeds and data."
        prog = "python -m experiments.compare"
        return comparison.compare(config.parse(config.COMPARISONS, arguments, prog, description))

    return errors.run(command)


if __name__ == "__main__":
    sys.exit(main())

"""Trains one model: `python -m experiments.train {gpt,resnet} [options]`.

The default gpt run takes under three minutes on two CPU cores. Run the same command again to go on
from the last checkpoint.
"""

import sys
from collections.abc import Sequence

from experiments import errors


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)

    def command() -> int:
        # Imported late, as it needs the packages of the extra, whose absence gets a message.
        from experiments import config, session

        description = "Train a model that names no dtype under a precision policy."
        options = config.parse(config.RUNS, arguments, "python -m experiments.train", description)
        return session.print_audit(options) if options.audit else session.Session(options, arguments).run()

    return errors.run(command)


if __name__ == "__main__":
    sys.exit(main())

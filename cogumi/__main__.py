"""`python -m cogumi` and the `cogumi` command, which also work if the command line's packages are missing."""

import sys

from cogumi.core.liveness import end_process_after


def main() -> None:
    try:
        from cogumi.cli.app import main as command_line
    except ImportError as error:
        if (error.name or "").startswith("cogumi"):
            raise
        print(f"cogumi: the command line cannot be loaded: {error}", file=sys.stderr)
        if sys.argv[1:2] == ["doctor"]:  # needs nothing but Python
            from cogumi.diagnostics.checkup import doctor

            print(doctor())
        else:
            fix = "`cogumi doctor` says what is missing, and what installs it"
            print(f"cogumi: {fix}", file=sys.stderr)
        sys.exit(1)
    with end_process_after():
        command_line()


if __name__ == "__main__":
    main()

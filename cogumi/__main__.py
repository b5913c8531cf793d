"""`python -m cogumi`, and the `cogumi` command: also where the command line's own packages are missing."""

import sys


def main() -> None:
    try:
        from cogumi.cli.app import main as command_line
    except ImportError as error:
        if (error.name or "").startswith("cogumi"):
            raise
        sys.exit(without_command_line(sys.argv[1:], error))
    command_line()


def without_command_line(words: list[str], error: ImportError) -> int:
    """The doctor needs nothing but Python, and says what is missing; everything else is one line. Returns the exit status."""
    print(f"cogumi: the command line cannot be loaded: {error}", file=sys.stderr)
    if words[:1] != ["doctor"]:
        print("cogumi: `cogumi doctor` says what is missing; sh requirements/install.sh installs it", file=sys.stderr)
        return 1
    from cogumi.diagnostics.checkup import doctor

    print(doctor())
    return 1


if __name__ == "__main__":
    main()

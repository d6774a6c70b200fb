"""`python -m kvjax` is the `kvjax` command."""

import sys


def main() -> None:
    """Run the command line; the entry point of the `kvjax` script."""
    try:
        from kvjax.cli import app

        app()
    except KeyboardInterrupt:  # so early that no command has begun
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`python -m kvjax` is the `kvjax` command."""

from kvjax.cli import main

if __name__ == "__main__":
    main()

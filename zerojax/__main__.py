"""The command line, as ``python -m zerojax``."""

from zerojax.cli import main

if __name__ == "__main__":
    main()

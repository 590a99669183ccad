"""The command line, as ``python -m zerojax``."""

from zerojax.app.cli import main

if __name__ == "__main__":
    main()

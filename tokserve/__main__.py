"""`python -m tokserve`."""

from tokserve.cli.main import main

if __name__ == "__main__":
    main()

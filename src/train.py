"""`python -m train …`: the command line of scorecal."""

from scorecal.cli import main

if __name__ == "__main__":
    main()

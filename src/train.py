"""`python -m train …`: the command line of scorecal."""

if __name__ == "__main__":
    # Here, because processes that an engine spawns import this file again.
    from scorecal.cli import main

    main()

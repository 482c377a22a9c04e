"""`python -m hpctrain` and the console script `hpctrain`. Imports no NumPy: thread counts must be set before it loads."""


def main() -> None:
    """Run the command line."""
    from hpctrain.cli.main import cli

    cli()


if __name__ == "__main__":
    main()

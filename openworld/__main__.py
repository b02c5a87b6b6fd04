"""The command `openworld`, also as `python -m openworld`."""

import sys


def main() -> int:
    """Run the command line, or name the extra to install where only the client is installed."""
    try:
        from openworld import cli
    except ModuleNotFoundError as error:
        print(
            f"error: the command openworld needs '{error.name}', which is not installed: pip install 'openworld[all]', "
            "or only 'openworld[serve]' or 'openworld[train]'",
            file=sys.stderr,
        )
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

"""One module per command. Each has SUMMARY, EPILOG, add_arguments and run."""

from importlib.util import find_spec

from models.errors import OpenWorldError


def require_packages(extra: str, *names: str) -> None:
    """Raise OpenWorldError with the extra to install, unless all packages are installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise OpenWorldError(f"not installed: {', '.join(missing)}. Install them: pip install 'openworld[{extra}]'")

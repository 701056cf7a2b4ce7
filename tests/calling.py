"""Commands run in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from orthomerge.cli.app import app
from orthomerge.core.errors import OrthomergeError


def call(*words: object, code: int = 0) -> Result:
    """Run a command; its exit code is that of `main`."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    error = result.exception
    if isinstance(error, OrthomergeError):
        assert error.exit_code == code, str(error)
    else:
        assert error is None or isinstance(error, SystemExit), repr(error)
        assert result.exit_code == code, result.output
    return result


def refused(*words: object, code: int) -> str:
    """Run a command that is refused, and return its message."""
    result = call(*words, code=code)
    return str(result.exception) if isinstance(result.exception, OrthomergeError) else result.output

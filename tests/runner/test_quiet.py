"""What the quiet block drops, what it keeps, and that it puts everything back."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from vlbatch.runner._quiet import quiet_libraries


def test_noise_is_dropped(capfd):
    """Prints, warnings and log lines below ERROR do not reach the screen."""
    with quiet_libraries():
        print("banner")  # noqa: T201 - the noise under test
        print("banner", file=sys.stderr)  # noqa: T201 - the noise under test
        warnings.warn("no ccache", UserWarning, stacklevel=1)
        logging.getLogger("library").warning("loading")

    assert capfd.readouterr() == ("", "")


def test_exceptions_pass_and_state_returns():
    """An exception leaves the block as it is, and everything is as before all the same."""
    root = logging.getLogger()
    before = (sys.stdout, sys.stderr, list(warnings.filters), list(root.handlers), root.level)

    @quiet_libraries()
    def import_broken_library() -> None:
        root.addHandler(logging.StreamHandler())
        root.setLevel(logging.DEBUG)
        warnings.simplefilter("error")
        raise RuntimeError("broken library")

    with pytest.raises(RuntimeError, match="broken library"):
        import_broken_library()

    after = (sys.stdout, sys.stderr, list(warnings.filters), list(root.handlers), root.level)
    assert after == before
    assert root.manager.disable == logging.NOTSET


def test_handlers_made_inside_work_afterwards(capsys):
    """A log handler that a library made while quiet reports to the real stderr later."""
    logger = logging.getLogger("vlbatch-test-library")
    logger.propagate = False
    with quiet_libraries():
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        logger.error("unseen")

    logger.error("seen")
    logger.removeHandler(handler)

    assert capsys.readouterr().err == "seen\n"


def test_a_stricter_threshold_is_kept():
    """A log threshold above WARNING set by the user holds inside and after the block."""
    logging.disable(logging.ERROR)
    try:
        with quiet_libraries():
            assert logging.root.manager.disable == logging.ERROR
        assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(logging.NOTSET)

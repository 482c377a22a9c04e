"""Lines of a test, as messages of virtual ranks name them."""

import inspect
from pathlib import Path


def line(offset: int = 0) -> str:
    """ "FILE.py:LINE" of the call, or of so many lines further down."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{Path(frame.f_back.f_code.co_filename).name}:{frame.f_back.f_lineno + offset}"

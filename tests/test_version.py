"""The version that files are stamped with is the installed package's."""

from importlib.metadata import version

import hpctrain
from hpctrain.version import __version__


def test_there_is_one_version() -> None:
    assert hpctrain.__version__ == __version__ == version("hpctrain")

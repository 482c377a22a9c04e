"""Progress modes: how messages advance while kernels run.

- none: messages do not advance between waits, or the transport itself drives them (MPICH_ASYNC_PROGRESS=1, offloading networks).
- test: the program tests operations in flight after each operator.
- thread: in addition to mode test, a thread tests every 200 us while an operator runs. Requires MPI at thread level "serialized".
"""

from __future__ import annotations

from enum import StrEnum

from hpctrain.comm.progress import ProgressEngine


class ProgressMode(StrEnum):
    """Way in which messages advance while kernels run.

    NONE: not driven by hpctrain. TEST: by tests after operators. THREAD: also by a thread.
    """

    NONE = "none"
    TEST = "test"
    THREAD = "thread"

    @property
    def in_words(self) -> str:
        """Description of the mode for users who have not read the documentation."""
        return {
            ProgressMode.NONE: "messages move by themselves while layers compute",
            ProgressMode.TEST: "messages move whenever a layer is done",
            ProgressMode.THREAD: "a thread moves messages while layers compute",
        }[self]


def apply(progress: ProgressEngine, mode: ProgressMode) -> None:
    """Switch `progress` to a mode."""
    progress.polls_between_operators = mode is not ProgressMode.NONE
    if mode is ProgressMode.THREAD:
        progress.start_thread()
    else:
        progress.stop_thread()

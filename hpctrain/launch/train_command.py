"""A command line in which a training is started: where its words begin, and the same command with another word in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.errors import LaunchError

_PROGRAM, _TRAIN, _RESUME = "hpctrain", "train", "--resume"
_SRUN = "srun"
_EXCLUDE = ("--exclude", "-x")


@dataclass(frozen=True)
class TrainCommand:
    """The words of a command; `train` is the word at the place `train_at`."""

    words: tuple[str, ...]
    train_at: int

    @classmethod
    def find(cls, words: Sequence[str]) -> TrainCommand:
        """The command, with its training found: the word `train` behind `hpctrain`, by whatever path.

        Raises:
            LaunchError: there is none, or there are several.
        """
        places = [place for place in range(1, len(words)) if words[place] == _TRAIN and Path(words[place - 1]).name == _PROGRAM]
        if len(places) != 1:
            found = "no training" if not places else f"{len(places)} trainings"
            raise LaunchError(
                f'The command "{" ".join(words)}" has {found} in it; it must have the words hpctrain train FILE once, as in '
                "mpiexec -n 4 python -m mpi4py -m hpctrain train FILE."
            )
        return cls(tuple(words), places[0])

    @property
    def training(self) -> tuple[str, ...]:
        """The words behind `train`: file, overrides and options."""
        return self.words[self.train_at + 1 :]

    @property
    def uses_srun(self) -> bool:
        """Slurm starts it."""
        return Path(self.words[0]).name == _SRUN

    def resumed(self, run: Path) -> TrainCommand:
        """The same, going on from the newest checkpoint of a run directory."""
        before, rest = self.words[: self.train_at + 1], _without(self.training, (_RESUME,))
        return TrainCommand((*before, _RESUME, str(run), *rest), self.train_at)

    def excluding(self, nodes: Iterable[str]) -> TrainCommand:
        """The same under `srun`, on none of these nodes, nor on those that it leaves out already."""
        given = _values(self.words[1 : self.train_at], _EXCLUDE)
        names = list(dict.fromkeys((*given, *nodes)))
        if not names:
            return self
        before = (self.words[0], f"{_EXCLUDE[0]}={','.join(names)}", *_without(self.words[1 : self.train_at], _EXCLUDE))
        return TrainCommand((*before, *self.words[self.train_at :]), len(before))


def _split(words: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without these options, and the values of the options."""
    kept: list[str] = []
    values: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option not in options:
            kept.append(word)
        elif equals:
            values.append(value)
        else:
            values += [following for following in [next(rest, None)] if following is not None]
    return kept, values


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    return _split(words, options)[0]


def _values(words: Sequence[str], options: Sequence[str]) -> list[str]:
    return _split(words, options)[1]

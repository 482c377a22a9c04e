"""Text for terminals, scripts, file names and errors: escaping, whole lines of many ranks, and the wording of messages.

It is loaded before a process becomes a rank, so it imports little. Functions for the end of an error message name the most
similar known name.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

# Control characters (C0, DEL, C1), format characters (bidirectional, zero-width), lone surrogates, and line separators.
_FORBIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Words with a comma, which some shell tools read as a list, or a leading =, read as a comparison, are quoted.
_PLAIN_WORD = re.compile(r"(?!=)[\w@%+=:./-]+", re.ASCII)
_SHOWN_CHARACTERS = 80
_MOST_OF_A_SENTENCE = 4000


def forbidden(text: str) -> str | None:
    """Return the first character that may end a line, move a cursor or reverse text, such as "U+202E at position 3".

    The result is None if there is no such character. Positions count from 0.
    """
    if text.isprintable():
        return None
    found = ((place, character) for place, character in enumerate(text) if unicodedata.category(character) in _FORBIDDEN)
    return next((f"U+{ord(character):04X} at position {place}" for place, character in found), None)


def escaped(text: object, keep: str = "") -> str:
    r"""Return the text with every forbidden character in Python's notation, such as \n and \u202e.

    Args:
        keep: forbidden characters that are not escaped.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        repr(character)[1:-1] if unicodedata.category(character) in _FORBIDDEN and character not in keep else character
        for character in text
    )


def shortened(value: object, most: int = _SHOWN_CHARACTERS) -> str:
    """Return the repr of a value for a message, truncated after `most` characters."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value)} characters)"
    text = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def sentence(text: str) -> str:
    """Return a message as one line for a terminal: forbidden characters are escaped, and a very long message loses its middle."""
    if len(text) > _MOST_OF_A_SENTENCE:
        half = _MOST_OF_A_SENTENCE // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
    return escaped(text)


def echo(line: object = "", *, err: bool = False) -> None:
    """Print one line to stdout, or to stderr. All forbidden characters are escaped, including newlines."""
    print(escaped(line), file=sys.stderr if err else sys.stdout, flush=True)


def echo_block(text: str, *, err: bool = False) -> None:
    """Print several lines, with or without a final newline. Forbidden characters other than newlines and tabs are escaped."""
    print(escaped(text.removesuffix("\n"), keep="\n\t"), file=sys.stderr if err else sys.stdout, flush=True)


def echo_wrapped(line: str) -> None:
    """Print a line to stdout, wrapped to COLUMNS if it is set, else to the width of the terminal, else to 80 columns."""
    echo_block(wrapped(line, shutil.get_terminal_size().columns))


def shell_word(text: str) -> str:
    """Return a text quoted as one word of a shell, without expansions."""
    if not text:
        return '""'
    return text if _PLAIN_WORD.fullmatch(text) else "'" + text.replace("'", "'\"'\"'") + "'"


#: width of lines without a terminal
LOG_COLUMNS = 80


def pipe_columns(columns: int = LOG_COLUMNS) -> int:
    """Return the width of output that is not a terminal: the variable COLUMNS if it is a positive integer, else `columns`."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) else columns


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "60,000 images", "3 classes"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ss') else 's'}"


def loss_text(loss: float) -> str:
    """Return a loss with four decimals, or with four significant digits from 1,000 on, such as 1.235e+26."""
    return f"{loss:.4f}" if abs(loss) < 1000 or not math.isfinite(loss) else f"{loss:.4g}"


def size_text(n_bytes: float) -> str:
    """Return a size with at most three significant digits, in the largest unit that it reaches: 512 bytes, 47.1 MB, 3 GB."""
    if n_bytes < 999.5:
        return counted(round(n_bytes), "byte")
    power = min(5, max(1, math.floor(math.log10(n_bytes / 0.9995) / 3)))
    return f"{n_bytes / 1000**power:.3g} {'kMGTP'[power - 1]}B"


def duration_text(seconds: float) -> str:
    """Return a time as h:mm:ss, with whole days in front: 0:00:07, 1:02:03, 2 d 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def fitting(facts: Sequence[tuple[int, str]], room: int) -> str:
    """Return the most important facts that fit into a line, in their order.

    Args:
        facts: pairs (priority, text); the fact with the largest number is left out first.
        room: maximum number of characters.
    """
    kept = [fact for fact in facts if fact[1]]
    while kept and len("  ".join(text for _, text in kept)) > room:
        kept.remove(max(kept, key=lambda fact: fact[0]))
    return "  ".join(text for _, text in kept)


#: minimum length of a line that ends with a clause, relative to the columns; a shorter line is filled with further words
_CLAUSE_SHARE = 0.6
#: a space at which a line may be broken: any except one between a number and its unit
_BREAK = re.compile(r"(?<!\d) | (?![A-Za-z%])")


def wrapped(text: str, columns: int) -> str:
    """Return a line as lines of at most `columns` columns; lines after the first are indented by two more.

    A line ends with a comma, semicolon or colon if it is then long enough, otherwise with any word, but not between a number and
    its unit. A word that does not fit into a line, such as a path, stays whole and on the line of the words before it.
    """
    indent = " " * (len(text) - len(text.lstrip()))
    first, *others = _BREAK.split(text.lstrip())
    lines, line, further = [], indent + first, indent + "  "
    for words in others:
        if len(f"{line} {words}") <= columns or len(further + words) > columns:
            line += f" {words}"
            continue
        ends = [match.start() for match in re.finditer("(?<=[,;:])(?: |$)", line)]
        clauses = [end for end in ends if _CLAUSE_SHARE * columns <= end <= columns]
        end = clauses[-1] if clauses and len(further + line[clauses[-1] :] + words) <= columns else len(line)
        lines.append(line[:end])
        line = further + f"{line[end:]} {words}".lstrip()
    return "\n".join([*lines, line])


def spans(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text with ranges: (0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_of(text: str, below: int | None = None) -> tuple[int, ...]:
    """Return the ranks in a text written by `spans`.

    Args:
        below: number of ranks of the job, to check text that may be damaged; None: no check.

    Raises:
        ValueError: the text was not written by `spans`, or a rank in it is not below `below`.
    """
    ranks: list[int] = []
    for span in text.split(", ") if text else ():
        first, _, last = span.partition("-")
        if below is not None and not 0 <= int(first) <= int(last or first) < below:
            raise ValueError(f"ranks {span} are not an increasing range below {below}")
        ranks.extend(range(int(first), int(last or first) + 1))
        if below is not None and len(ranks) > below:
            raise ValueError(f"more than {below} ranks")
    return tuple(ranks)


# Number of bytes that a pipe accepts in one write without interleaving other writes (POSIX: at least 512; Linux: 4096).
_WHOLE_BYTES = 4096
_TAB = "\t"


def place(rank: int | None, size: int | None = None) -> str:
    """Return the prefix of a rank's line if several ranks print: "[3/64@node7] ".

    Args:
        rank: rank; None if unknown, for an empty prefix.
        size: number of ranks of the job; None to leave it out.
    """
    if rank is None:
        return ""
    return f"[{rank}{'' if size is None else f'/{size}'}@{platform.node().partition('.')[0]}] "


def beginning_with(beginning: str, text: str) -> str:
    """Return a text with escaped control characters, with `beginning` before each line and a newline at the end."""
    return "".join(f"{beginning}{escaped(line, keep=_TAB)}\n" for line in text.splitlines())


def write_lines(text: str, descriptor: int = 2) -> None:
    """Write lines, the last of which ends with a newline, to a descriptor without Python's streams, in writes of whole lines.

    Writes of other ranks to the same pipe can interrupt only lines of more than 4096 bytes.

    Raises:
        OSError: the descriptor cannot be written to.
    """
    whole = b""
    for line in text.encode(errors="backslashreplace").splitlines(keepends=True):
        if whole and len(whole) + len(line) > _WHOLE_BYTES:
            _write(whole, descriptor)
            whole = b""
        whole += line
    _write(whole, descriptor)


def _write(data: bytes, descriptor: int) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def colours(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Return whether output may have colours: on a terminal that supports them, unless NO_COLOR is set (no-color.org)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and os.isatty(descriptor)


_CUTOFF = 0.6  # minimum of difflib's similarity: words of three letters that differ in one have 0.67


_MOST_LISTED = 30


_MOST_COMPARED = 200


#: configuration key, option, value or command -> words that other frameworks use for it; a key has its whole path, so that a
#: message can name a key of another section
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "averager": ("allreduce", "ddp", "strategy"),
    "backend": ("accelerator", "cuda", "device", "devices", "gpu", "gpus", "use_cuda", "use_gpu"),
    "batch": ("batch", "batch_size", "bs", "global_batch", "global_batch_size", "mini_batch", "minibatch", "train_batch_size"),
    "batch_norm.statistics": ("sync_batchnorm", "sync_bn"),
    "checkpoint.every_epochs": ("checkpoint_every", "checkpoint_interval", "save_every", "save_freq", "save_interval"),
    "data.augment": ("augmentation", "augmentations", "transform", "transforms"),
    "data.mixing.cutmix": ("cutmix", "cutmix_alpha"),
    "data.mixing.mixup": ("mixup", "mixup_alpha"),
    "data.normalise": ("normalise", "normalize"),
    "data.prefetch": ("prefetch_factor",),
    "data.test": ("test", "test_data", "test_file"),
    "data.threads": ("data_workers", "dataloader_workers", "n_workers", "num_workers", "workers"),
    "data.train": ("data_dir", "data_path", "dataset", "path", "root", "train", "train_data", "train_dir", "train_file"),
    "data.validation": ("dev", "val", "val_data", "val_split", "valid", "validation", "validation_split"),
    "early_stop.patience": ("early_stopping_patience", "patience"),
    "ema.decay": ("ema_decay", "model_ema"),
    "epochs": ("epoch", "epochs", "iterations", "max_epochs", "max_iter", "n_epochs", "nepochs", "num_epochs", "total_epochs"),
    "evaluate.batch": ("eval_batch_size", "test_batch_size", "val_batch_size"),
    "evaluate.every_epochs": ("eval_every", "eval_freq", "eval_interval", "val_every", "val_freq", "val_interval"),
    "init.weights": ("pretrained", "pretrained_weights"),
    "loss.class_weights": ("class_weight", "class_weights"),
    "loss.label_smoothing": ("label_smoothing", "smoothing"),
    "max_time": ("time_limit", "walltime"),
    "micro_batches": ("accumulate_grad_batches", "accumulation_steps", "grad_accum", "gradient_accumulation_steps"),
    "model": ("arch", "architecture", "backbone", "net", "network"),
    "model.classes": ("classes", "n_classes", "num_classes"),
    "name": ("exp_name", "experiment", "experiment_name", "run_name"),
    "optimizer.beta1": ("betas",),
    "optimizer.clip_norm": ("clip", "clip_grad_norm", "clip_norm", "grad_clip", "gradient_clip", "max_grad_norm", "max_norm"),
    "optimizer.epsilon": ("eps",),
    "optimizer.lr": ("base_lr", "eta", "init_lr", "initial_lr", "learning_rate", "lr", "max_lr"),
    "optimizer.momentum": ("momentum",),
    "optimizer.nesterov": ("nesterov",),
    "optimizer.weight_decay": ("l2", "wd", "weight_decay"),
    "output": ("log_dir", "logdir", "out_dir", "output_dir", "save_dir"),
    "precision": ("amp", "fp16", "half", "mixed_precision", "use_amp"),
    "schedule": ("lr_policy", "lr_schedule", "lr_scheduler", "sched", "scheduler"),
    "schedule.milestones_epochs": ("milestones", "step_size"),
    "schedule.warmup_epochs": ("warm_up", "warmup", "warmup_epochs", "warmup_steps"),
    "seed": ("manual_seed", "random_seed", "random_state"),
    "threads": ("n_threads", "num_threads"),
    "trace": ("profile", "profiler"),
    "auto": ("last", "latest", "newest"),
    "bfloat16": ("bf16", "fp16", "half"),
    "cuda": ("gpu", "nvidia"),
    "float32": ("f32", "fp32", "single"),
    "flip": ("hflip", "horizontal_flip", "random_horizontal_flip"),
    "onednn": ("cpu", "mkldnn"),
    "pad_crop": ("random_crop",),
    "plateau": ("reduce_lr_on_plateau", "reduce_on_plateau"),
    "step": ("multi_step", "multistep"),
    "bench": ("benchmark",),
    "eval": ("evaluate", "test", "validate"),
    "predict": ("classify", "infer", "inference"),
    "train": ("fit",),
}
#: minimum similarity of a misspelt word if several words may be meant
MISSPELT = 0.8


def synonyms(name: str) -> list[str]:
    """Return the keys, options, values and commands that a word of the field means, such as "optimizer.lr" for learning_rate.

    They are in the order of the table; keys have their whole path. The list is empty if the table has no such word.
    """
    if len(name) > _MOST_COMPARED:
        return []
    import difflib

    word = name.lower().replace("-", "_")
    words = {synonym for of_key in SYNONYMS.values() for synonym in of_key}
    if word not in words:
        word = next(iter(difflib.get_close_matches(word, sorted(words), n=1, cutoff=MISSPELT)), "")
    return [key for key, of_key in SYNONYMS.items() if word in of_key]


def nearest(name: str, names: Iterable[str], cutoff: float = _CUTOFF) -> str | None:
    """Return the nearest of `names`; None if no name is similar.

    A very similar name comes first, then a name that this word of the field means (see `synonyms`), then the most similar one.
    The case of letters is ignored. Among equally similar names, the one with the longest common beginning is returned, then the
    first in alphabetical order.

    Args:
        cutoff: minimum similarity, from 0 to 1, unless the word of the field means the name.
    """
    if len(name) > _MOST_COMPARED:  # no name is similar, and the comparison would be slow
        return None
    import difflib  # here, as few processes need it

    known = sorted(names, key=lambda known: (known.lower(), known))
    if name in known:
        return name
    word = name.lower()
    matcher = difflib.SequenceMatcher(b=word)

    def similarity(candidate: str) -> tuple[float, int]:
        matcher.set_seq1(candidate.lower())
        return matcher.ratio(), len(os.path.commonprefix([candidate.lower(), word]))  # noqa: RUF071  characters are meant

    close = set(difflib.get_close_matches(word, {candidate.lower() for candidate in known}, n=max(1, len(known)), cutoff=cutoff))
    similar = max((candidate for candidate in known if candidate.lower() in close), key=similarity, default=None)
    if similar is not None and similarity(similar)[0] >= MISSPELT:
        return similar
    last = [key.rpartition(".")[2] for key in synonyms(name)]
    return next((key for key in last if key in known), similar)


def choices(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence without its full stop: the most similar name, and all names unless there are too many."""
    quoted = {known: f'"{known}"' for known in names}
    if len(quoted) < 2:
        return f"there is only {next(iter(quoted.values()))}" if quoted else "there are none"
    listed = ", ".join(quoted.values())
    few = len(quoted) <= _MOST_LISTED
    near = nearest(name, quoted)
    if near is None:
        return f"there are {listed}" if few else f"there are {len(quoted)} names, such as {next(iter(quoted.values()))}"
    return f"the nearest is {quoted[near]} (of {listed})" if few else f"the nearest is {quoted[near]}"


def joined(rules: Iterable[str]) -> str:
    """Return several rules, one of which must hold, as one text: "must be an integer or a list"."""
    first, *others = dict.fromkeys(rules)
    return " or ".join((first, *(other.removeprefix("must be ") for other in others)))

"""Real text that every Python installation has: the source files of its standard library, as characters."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """Characters as indices into `vocabulary`, a beginning to train on and an end to validate on."""

    vocabulary: str
    training: Tensor
    validation: Tensor

    def batch(
        self, text: Tensor, batch: int, context: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """`batch` random windows of `text` and, as targets, the same windows one character later."""
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        windows = text[starts + torch.arange(context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_corpus(limit_bytes: int) -> Corpus:
    """The standard library's top level modules in the order of their names, at most `limit_bytes`."""
    folder = Path(sysconfig.get_path("stdlib"))
    pieces: list[bytes] = []
    room = limit_bytes
    for path in sorted(folder.glob("*.py")):
        # One byte a character: the few that are not ASCII would be most of the vocabulary.
        pieces.append(path.read_text(encoding="utf-8").encode("ascii", "replace")[:room])
        room -= len(pieces[-1])
        if not room:
            break
    text = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    if len(text) == 0:
        raise FileNotFoundError("the standard library of this Python has no source files to train on")
    characters, indices = text.unique(return_inverse=True)
    split = int(len(indices) * (1 - VALIDATION_SHARE))
    return Corpus(bytes(characters.tolist()).decode("ascii"), indices[:split], indices[split:])

"""How a run writes its checkpoints, and finds them again."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ..errors import RunError

CHECKPOINTS_KEPT = 2
CRITIC = "critic"  # the critic's folder in a checkpoint


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """If a write to the folder fails because of the disk, raise the disk's error, such as "No space left on device".

    Libraries hide it: torch.save says "unexpected pos 2929408 vs 2929296".
    """
    try:
        yield
    except Exception as error:
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(1 << 20))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as cause:
            raise OSError(cause.errno, cause.strerror, str(folder)) from error
        raise


def write_checkpoint(run_folder: Path, step: int, save: Callable[[Path], None], rank: int = 0) -> Path:
    """Write a checkpoint with `save(folder)`, and remove old ones. All ranks call this. Returns the folder."""
    new_checkpoint(run_folder, step, rank)
    return end_checkpoint(run_folder, step, save, rank)


def end_checkpoint(run_folder: Path, step: int, save: Callable[[Path], None], rank: int = 0) -> Path:
    """As `write_checkpoint`, in the folder that `new_checkpoint` has made.

    The folder gets its final name last, so a kill at any moment leaves a whole checkpoint.
    """
    final, unfinished = run_folder / f"checkpoint-{step:06d}", run_folder / f"unfinished-{step:06d}"
    with disk_errors(run_folder):
        save(unfinished)
    wait_for_ranks()
    if rank == 0:
        for path in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(path)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        flush_to_disk(run_folder)
        for old in checkpoints(run_folder)[:-CHECKPOINTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)  # on NFS, a file that somebody reads stays until the next time
    return final


def new_checkpoint(run_folder: Path, step: int, rank: int = 0) -> Path:
    """Have rank 0 make the empty folder of a checkpoint, which all ranks return. Raises RunError on a rank that does
    not see it."""
    folder = run_folder / f"unfinished-{step:06d}"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    wait_for_ranks()
    if not folder.is_dir():
        raise RunError(
            f"{folder} is not on this node: all ranks write their parts of a checkpoint, so --output must be on a disk"
            " that their nodes share"
        )
    return folder


def checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoints that a run has left there, in order. A user's own copies have other names."""
    return sorted(run_folder.glob(f"checkpoint-{'[0-9]' * 6}"))


def last_checkpoint(run_folder: Path) -> Path:
    """The newest checkpoint. Raises RunError if there is none."""
    if not (found := checkpoints(run_folder)):
        raise RunError(f"{run_folder} has no checkpoint to continue from")
    return found[-1]


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: a kill at any moment leaves either the old text or the new one."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    flush_to_disk(unfinished)
    unfinished.rename(path)


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_for_ranks() -> None:
    """Return once all ranks have called this."""
    if dist.is_initialized():
        dist.barrier()

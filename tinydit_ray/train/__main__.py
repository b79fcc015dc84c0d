"""Train one model and score it: one experiment, one command.

    python -m tinydit_ray.train --out runs/x --steps 4000 --set dim=128 --set depth=4 --amp bf16

Exit status: 0 complete; 2 bad usage; 3 diverged or out of memory, with the last good checkpoint kept;
130 interrupted, with a checkpoint from which the same command goes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch

from tinydit_ray.bench.memory import is_oom
from tinydit_ray.data import DataError, DataSpec, load, prepare, resolve
from tinydit_ray.process import keep_freed_memory
from tinydit_ray.storage import Storage, StorageError
from tinydit_ray.train.files import RunFolder
from tinydit_ray.train.interrupt import Stop
from tinydit_ray.train.options import TrainError, TrainOptions, parse
from tinydit_ray.train.progress import Screen, clock
from tinydit_ray.train.report import metrics
from tinydit_ray.train.run import Training
from tinydit_ray.train.trainer import Diverged

OK, USAGE, FAILED, INTERRUPTED = 0, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:  # each kind of mistake in the options is one: one line
        return _refuse(error)
    try:
        return run(options)
    except (TrainError, DataError) as error:
        return _refuse(error)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_oom(error):
            if isinstance(error, OSError):  # a full disk, a folder that went away
                return _refuse(error)
            raise
        print(f"out of memory: {str(error).splitlines()[0]}; try a smaller --batch-size", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"interrupted; go on with the same command: {options.command}", file=sys.stderr)
        return INTERRUPTED


def run(options: TrainOptions) -> int:
    """Everything of one run, in its folder; the exit status."""
    torch.set_num_threads(options.cell.cpus_per_worker)
    keep_freed_memory()  # as in a sweep's trials
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns of a missing CUDA on a CPU machine
    screen = Screen(options.steps, options.cell.batch_size)
    screen.say(f"{options.device_reason}; CPU threads: {options.cell.cpus_per_worker}")
    spec, reason = resolve(options.data, options.classes)
    screen.say(reason)
    if options.storage:
        _check(options.storage)
    with RunFolder(options.out, options.storage) as folder:
        training = _prepare(options, spec, folder, screen)
        if _is_complete(training):
            screen.say(f"{options.out} is complete: step {training.steps} of {options.steps}; nothing to do")
            return OK
        try:
            return _train_and_score(training)
        except Diverged as error:
            return _diverged(training, error)


def _check(storage: Storage) -> None:
    try:
        storage.check()
    except StorageError as error:
        raise TrainError(f"--storage {storage.uri}: {error}") from None


def _prepare(options: TrainOptions, spec: DataSpec, folder: RunFolder, screen: Screen) -> Training:
    """Decoded data, the seeded model, and what an earlier session left."""
    spec = prepare(spec)
    train, test = load(spec, "train"), load(spec, "test")
    same = train.notes == test.notes
    for name, split in (("images", train),) if same else (("train images", train), ("test images", test)):
        for note in split.notes:
            screen.say(f"{name}: {note}")
    training = Training(options, spec, train, test, folder, screen)
    training.resume()
    return training


def _is_complete(training: Training) -> bool:
    """Trained and scored as asked; with other scoring options only the scores are made anew."""
    found, options = training.folder.read_metrics(), training.options
    return (
        training.steps == options.steps
        and found.get("status") == "complete"
        and found.get("steps") == options.steps
        and found.get("scoring") == options.scoring
        and (options.out / "samples.png").exists()
    )


def _train_and_score(training: Training) -> int:
    options, screen = training.options, training.screen
    _announce(training)
    stop = Stop()
    with screen, stop.listening():
        finished = training.train(stop)
    if not finished:
        print(f"stopped at step {training.steps} of {options.steps}, checkpoint written", file=sys.stderr)
        print(f"go on with the same command: {options.command}", file=sys.stderr)
        return INTERRUPTED
    report = metrics(training, "complete", training.score())
    training.folder.write_metrics(report)
    took = f"{clock(report['train_wall_s'])} of training"
    pace = f", {report['ms_per_step']:.1f} ms/step" if report["ms_per_step"] else ""
    screen.say(f"complete: velocity MSE {report['velocity_mse']:.4f}, {took}{pace}; see {options.out}")
    return OK


def _announce(training: Training) -> None:
    cell, options, say = training.cell, training.options, training.screen.say
    count = sum(p.numel() for p in training.model.parameters())
    compiled = "eager" if cell.compile == "off" else f"compile {cell.compile}"
    say(
        f"model {cell.model}, {count:,} parameters; {cell.attention} attention, {cell.precision}, {compiled};"
        f" batch {cell.batch_size}, lr {cell.lr:g}, seed {cell.seed}; {options.steps} steps to {options.out}"
    )
    if training.steps:
        say(f"going on from step {training.steps}")


def _diverged(training: Training, error: Diverged) -> int:
    """Say so, and say what is left: a checkpoint is only ever written of finite weights."""
    training.folder.write_metrics(metrics(training, "diverged", reason=str(error)))
    kept = f"the last good checkpoint is of step {training.saved[0]}" if training.saved else "no checkpoint yet"
    print(f"diverged: {error}; {kept}; try a lower --lr, or bf16 or fp32 instead of fp16", file=sys.stderr)
    return FAILED


def _refuse(error: Exception) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())

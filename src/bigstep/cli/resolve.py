"""From what was typed to a job: the configuration, the folder, and whether this machine can hold the ranks.

Imports no torch, so that a mistake is reported before any process is started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigstep.cli.options import require_device
from bigstep.config import RunConfig
from bigstep.config.edit import finish_on_one, make_exact, same_experiment, stretch
from bigstep.config.text import apply_settings, config_from_mapping, read_yaml
from bigstep.config.trust import names_code, require_trust
from bigstep.described import usable_cores
from bigstep.engine.job import Job
from bigstep.errors import ConfigError, DataError, require
from bigstep.recipes.on_text import on_text, said_of_text, wants_text
from bigstep.records import read_run

if TYPE_CHECKING:
    from bigstep.cli.train import Train

__all__ = [
    "finished_result",
    "for_model",
    "job_of",
    "named_config",
    "new_folder",
    "require_capacity",
    "require_trusted",
]

RUNS = Path("runs")
_GROUP = Path("/sys/fs/cgroup")
"""Limits of this container, and what it uses."""
_PROCESS_BYTES = 300e6
"""Memory that a rank or replica takes by itself: with torch 2.13 on a CPU 306 to 362 MiB, here rounded down."""
_PROCESSES_PER_CORE = 16
"""More processes than this only wait for one another; a rank hosts any number of workers."""


def job_of(options: Train, *, launched: bool) -> Job:
    """Build the configuration and find the folder, or say in one sentence why not.

    Args:
        options: What was typed.
        launched: Whether torchrun or a scheduler started this: it gives the same command line to the first start and
            to every later one, so --resume with nothing to resume begins a new run.
    """
    require_device(options.device, "auto", "cpu", "cuda", "shared")
    require(1 <= options.timeout <= 1e6, f"--timeout is {options.timeout:g}, but it must be 1 to 1,000,000 seconds.")
    folder = _existing_folder(options, launched) if options.resume else None
    named = _base_config(options, folder)
    config = for_model(named, options.model, options.settings)
    turned = config is not named
    if options.epochs is not None:
        config = stretch(config, options.epochs)
    config = apply_settings(config, [*_short_settings(options, config), *(options.settings or ())])
    if options.finish_on_one is not None:
        config = finish_on_one(config, options.finish_on_one)
    if options.exact:
        config = make_exact(config)
    if options.elastic and config.islands.count > 1:
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, meetings=True))
    _check_profile(options, config)
    typed = [options.model or "", options.data or "", *(options.settings or ())]
    require_trusted(config, options.config or folder, typed, trusted=options.trust)
    return Job(
        config=config,
        folder=folder or new_folder(options, f"{config.recipe}-{config.preset}"),
        resume=options.resume,
        steps=options.steps,
        profile=options.profile or 0,
        facts=_facts(options, config),
        said=(said_of_text(named, config),) if turned else (),
        device=options.device,
        timeout_s=options.timeout,
        trackers=tuple(name for name in ("tensorboard", "wandb", "mlflow") if getattr(options, name)),
        report=options.report,
        as_json=options.as_json,
        **_elsewhere(options, config),
    )


def _elsewhere(options: Train, config: RunConfig) -> dict[str, Any]:
    """What other machines bring to a Downpour run, and the address at which they join it."""
    shards, replicas = options.shards_elsewhere, options.replicas_elsewhere
    if options.listen is None:
        require(not (shards or replicas), "Other machines need an address to join at: add --listen HOST:PORT.")
        return {}
    settings = config.asynchronous
    require(
        settings.method == "downpour",
        f"--listen is {options.listen!r:.60}, but only Downpour runs can be joined; start others with torchrun.",
    )
    require(
        shards <= settings.shards and replicas <= settings.replicas,
        f"{shards} shards and {replicas} replicas are to come from elsewhere, but the run has {settings.shards} and "
        f"{settings.replicas} in all: raise asynchronous.shards and asynchronous.replicas to the totals.",
    )
    return {"listen": options.listen, "elsewhere": (shards, replicas)}


def named_config(recipe: str | None, preset: str, file: Path | None, *, trusted: bool) -> RunConfig:
    """Return the configuration of a recipe, or of a file if one is named; naming both is a mistake."""
    from bigstep import recipes

    if file is None:
        return recipes.load(recipe or "plain", preset)
    if recipe is not None:
        raise ConfigError(f"Both the recipe {recipe!r:.60} and --config {file} were given; give one.")
    require(
        preset == "mini",
        f"--preset {preset:.60} belongs to a recipe, but --config {file} is a whole configuration: leave it out, or "
        f"write a new file with `bigstep recipes NAME --yaml --preset {preset:.60}`.",
    )
    if os.path.isfile(file / "run.json"):  # unlike Path.is_file, it never raises
        return recorded_config(file)
    if file.name == "run.json":
        return recorded_config(file.parent)
    return recipes.read(read_yaml(file), file, trusted=trusted)


def recorded_config(folder: Path) -> RunConfig:
    """Return the configuration of a run; refuse it if the run used parts that only a program can supply."""
    run = read_run(folder)
    config = config_from_mapping(run.config)
    named = {field.partition(".")[0] for field, value in config.code.items() if names_code(value)}
    given = [part for part in ("model", "data", "loss", "optimizer") if part in run.used and part not in named]
    require(
        not given,
        f"The run in {folder} took its {' and '.join(given)} from a program, which alone can train it: run that again, "
        "with fit(…, resume=True) to continue.",
    )
    return config


def require_trusted(config: RunConfig, origin: Path | None, typed: Iterable[str], *, trusted: bool) -> None:
    """Refuse code that only a file names: what the command line names too is the user's own choice.

    Args:
        config: As it will run.
        origin: The file or folder that it was read from; None for a recipe of bigstep's.
        typed: Words of the command line.
        trusted: Whether --trust was given.
    """
    if origin is not None:
        words = {word for given in typed for word in (given, given.partition("=")[2].strip("\"' "))}
        require_trust({*config.code.values()} - words, origin, trusted=trusted)


def _base_config(options: Train, folder: Path | None) -> RunConfig:
    """What the other options change: the configuration of the run to resume, unless a recipe or a file is named."""
    if folder is not None and (folder / "run.json").exists():
        recorded = recorded_config(folder)
        if options.recipe is None and options.config is None:
            return recorded
    return named_config(options.recipe, options.preset, options.config, trusted=options.trust)


def for_model(config: RunConfig, model: str | None, settings: Iterable[str] | None) -> RunConfig:
    """Adapt a recipe for images to text if an option or a setting asks for a model of tokens."""
    pairs = [setting.partition("=") for setting in settings or ()]
    asked = [value.strip("\"' ") for name, _, value in pairs if name.strip() == "model"] or [model or ""]
    return on_text(config, asked[-1]) if asked[-1] and wants_text(config, asked[-1]) else config


def _short_settings(options: Train, config: RunConfig) -> Iterator[str]:
    """Write the everyday options as settings of the fields that they stand for."""
    if options.data is not None:
        from bigstep.data.names import name_of_set

        name, path = name_of_set(options.data, config.data.name)
        yield from (f"data.name={json.dumps(name)}", f"data.path={json.dumps(path)}")
    plain = {"lr.base": options.lr, "seed": options.seed, "model": options.model, "workers.count": options.workers}
    yield from (f"{field}={json.dumps(value)}" for field, value in plain.items() if value is not None)
    if options.batch is not None:
        yield _batch_setting(options.batch, options.workers, config)


def _batch_setting(batch: int, workers: int | None, config: RunConfig) -> str:
    """Divide a global batch: among the workers that were asked for, else into local batches of the recipe's size."""
    share, what = (config.workers.local_batch, "local batch") if workers is None else (workers, "number of workers")
    require(share > 0, f"--workers is {workers}, but it must be greater than 0.")
    if batch < 1 or batch % share:
        nearest = max(1, round(batch / share)) * share
        raise ConfigError(
            f"--batch is {batch}, but it must be a multiple of {share}, the {what}: take {nearest}, or set "
            "workers.count and workers.local_batch."
        )
    return f"{'workers.count' if workers is None else 'workers.local_batch'}={batch // share}"


def _check_profile(options: Train, config: RunConfig) -> None:
    if options.profile is None:
        return
    if options.profile < 1:
        raise ConfigError(f"--profile is {options.profile}, but it must be a number of steps, for example 5.")
    if config.asynchronous.method != "none":
        raise ConfigError("--profile looks at synchronous steps, but this recipe is asynchronous; take another.")
    from bigstep.engine.profile.groups import WARM_UP_STEPS

    if options.steps is not None and options.steps <= WARM_UP_STEPS:
        raise ConfigError(
            f"--profile begins after {WARM_UP_STEPS} steps of warm-up, but --steps is {options.steps}; use --steps "
            f"{WARM_UP_STEPS + options.profile} or more."
        )


def _facts(options: Train, config: RunConfig) -> dict[str, Any]:
    """What the records say about the run besides its configuration."""
    from bigstep import recipes

    published = recipes.describe(config.recipe).published if recipes.exists(config.recipe) else None
    facts = {
        "published": None if published is None else dataclasses.asdict(published),
        "name": options.name,
        "tags": options.tag or None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def new_folder(options: Train, name: str) -> Path:
    """Return the folder of a new run: that of --out, else a new one under runs/, called by --name or by `name`."""
    if options.out is not None:
        if options.out.exists() and not options.out.is_dir():
            raise ConfigError(f"--out {options.out} is a file; name a folder.")
        if options.out.is_dir() and any(options.out.iterdir()):
            raise ConfigError(
                f"--out {options.out} is not empty; add --resume to continue its run, or name a new folder."
            )
        return options.out
    name, number = folder_name(options.name or name), 2
    candidate = RUNS / name
    while candidate.exists():
        candidate, number = RUNS / f"{name}-{number}", number + 1
    return candidate


def folder_name(text: str) -> str:
    """Return a name for a single folder, made from any text.

    >>> folder_name("sony-mini"), folder_name("../../etc/run"), folder_name("my run/2")
    ('sony-mini', 'etc-run', 'my-run-2')
    """
    return re.sub(r"[^\w.-]+", "-", text).strip(".-")[:80] or "run"


def _existing_folder(options: Train, launched: bool) -> Path | None:
    """Return the folder of the run to resume; None if a scheduler's first start is to begin it."""
    if options.out is not None:
        if launched or (options.out / "run.json").exists() or any(options.out.glob("checkpoints/*.ckpt")):
            return options.out
        raise ConfigError(f"--resume finds no run in {options.out}; leave --resume out to start one there.")
    name = "" if options.config or not options.recipe else f"{options.recipe}-{options.preset}"
    name = folder_name(options.name) if options.name else name
    found = _unfinished(name)
    if len(found) == 1:
        return found[0]
    if not found:
        if launched:
            return None
        raise ConfigError(
            f"--resume finds no unfinished run{f' of {name}' if name else ''} under {RUNS}/; name it with --out."
        )
    listed = ", ".join(map(str, found[:3])) + (", …" if len(found) > 3 else "")
    raise ConfigError(f"--resume finds {len(found)} unfinished runs ({listed}); say which with --out.")


def _unfinished(name: str) -> list[Path]:
    """Folders of unfinished runs with this name, or this name and a number; for an empty name, of all."""
    found, broken = [], None
    for path in sorted(RUNS.glob("*/run.json")):
        if not name or re.fullmatch(rf"{re.escape(name)}(-\d+)?", path.parent.name):
            try:
                found += [] if read_run(path.parent).result else [path.parent]
            except DataError as error:  # perhaps of another run
                broken = error
    if broken and not found:
        raise broken
    return found


def finished_result(job: Job) -> dict[str, Any] | None:
    """Return the result of a run with nothing left to do, else None; a run that --steps ended may go on."""
    if not (job.folder / "run.json").exists():
        return None
    run = read_run(job.folder)
    enough = job.steps is not None and run.result.get("steps", 0) >= job.steps
    if not run.result or not (enough or run.complete):
        return None
    # with other settings, resuming it is refused later, as for an unfinished run
    return run.result if same_experiment(config_from_mapping(run.config), job.config) else None


def require_capacity(procs: int, job: Job) -> None:
    """Refuse more ranks than there are workers, or more processes than this machine's cores and memory hold."""
    method, cores = job.config.asynchronous.method, usable_cores()
    workers = max([job.config.workers.count, *(stage.count for stage in job.config.stages)])
    processes, given = procs, f"--procs is {procs}"
    if method == "none":
        require(
            procs <= workers,
            f"--procs is {procs}, but the run has {workers} workers and each rank needs one: use --procs {workers} or "
            f"fewer, or --workers {procs}.",
        )
    else:
        require(
            procs == 1,
            f"--procs is {procs}, but a {method} run starts its own processes: leave it out, and set "
            "asynchronous.replicas.",
        )
        shards = job.config.asynchronous.shards if method == "downpour" else 0
        processes = job.config.asynchronous.replicas + shards
        given = f"asynchronous asks for {processes} processes"
    most = _PROCESSES_PER_CORE * cores
    require(processes <= most, f"{given}, but on {cores} cores more than {most} would only wait for one another.")
    most = int(_free_bytes() / _PROCESS_BYTES)
    require(
        processes <= most,
        f"{given}, but each takes {_PROCESS_BYTES / 1e9:.1f} GB, and this machine has memory for {most} of them now.",
    )


def _free_bytes() -> float:
    """Bytes of memory still free, by the system and by the limit of this container; files kept in it give way."""
    free = 1e15  # if the system does not say
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1_024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        limit, used = (float((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        files = float(parts["active_file"]) + float(parts["inactive_file"])
    except (OSError, StopIteration, ValueError, KeyError):  # not Linux, no such group, or "max": no limit
        return free
    return min(free, limit - used + files)

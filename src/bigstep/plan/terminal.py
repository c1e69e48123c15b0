"""The answer of `bigstep plan` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bigstep.plan.crossover import spoken_rate

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "asks_sentence", "crossover_sentence", "priced_way", "render", "spoken_devices", "spoken_goal", "spoken_minutes",
    "way_sentences",
]  # fmt: skip

BEST = 8
"""Rows of the ranking that a terminal shows."""
A_MILLION = "price/M"
"""Heads the prices of a million samples, which are told where no law of epochs is known."""


def render(result: dict[str, Any]) -> None:
    """Print the dictionary that `cli_result` returned."""
    from rich.console import Console

    console = Console()
    if result["kind"] == "validation":
        _render_validation(result, console)
    elif result["kind"] == "local-validation":
        _render_local(result, console)
    else:
        _render_plan(result, console)


def _render_plan(result: dict[str, Any], console: Console) -> None:
    best = result["best"]
    grid = f" {best['grid'][0]}x{best['grid'][1]}" if best["grid"] else ""
    goal = spoken_goal(result) or "ranked by samples a second"
    tokens = f"{best['tokens_per_s']:,.0f} tokens/s, " if best["tokens_per_s"] else ""
    console.print(
        f"[bold]{result['model']} on {spoken_devices(best['gpus'])} of {result['cluster']}: {goal}[/bold]\n"
        f"recipe {best['recipe']}, batch {best['batch']:,} ({best['local_batch']:g} a device), "
        f"{best['collective']}{grid}, codec {best['codec']}, buckets of {best['bucket_mb']:g} MB: "
        f"{best['step_ms']:.2f} ms a step, {best['samples_per_s']:,.0f} samples/s, {tokens}"
        f"efficiency {100 * best['efficiency']:.1f} %"
    )
    _set_apart(console, _choices(result["ranking"][:BEST], console.width, with_gpus=False))
    for sentence in result["why"]:
        console.print(sentence)
    console.print(asks_sentence(result["asks"]))
    console.print(crossover_sentence(result))
    _render_ways(result, console)
    if law := result["law"]:
        none = "the same number at every batch tried"
        size = f"at a batch of {law['critical_batch']:,.0f}, the critical one, half of them are due to its size"
        console.print(f"Epochs: from {law['source']}; {size if law['epochs_per_sample_of_batch'] else none}.")
    sure = result["sure"]
    console.print(
        f"How sure: the same model is off by {100 * sure['mean_error']:.0f} % on average and "
        f"{100 * sure['worst_error']:.0f} % at worst on {sure['predicted']} published rows (bigstep plan --validate)."
    )
    for warning in result["warnings"]:
        console.print(f"[yellow]Note: {warning}.[/yellow]")
    if result["sweep"]:
        console.print(_choices(result["sweep"], console.width, with_gpus=True))


def asks_sentence(asks: dict[str, Any]) -> str:
    """Tell what the model needs on each device."""
    memory = asks["memory_gb"]
    held = {"weights": "weights", "gradients": "gradients", "optimizer": f"states of {asks['optimizer']}",
            "activations": "activations"}  # fmt: skip
    parts = ", ".join(f"{words} {_figure(memory[name], 2)}" for name, words in held.items())
    work = f"{_figure(asks['gflop_a_sample'], 1)} GFLOP a sample, " if asks["gflop_a_sample"] else ""
    return (
        f"Each device needs: {work}{_figure(asks['gradient_mb'], 0)} MB of gradient a step, and at "
        f"least {_figure(sum(memory.values()), 1)} of its {asks['device_gb']:,.0f} GB of memory ({parts})."
    )


def _set_apart(console: Console, table: Any) -> None:
    """Print a table with an empty line before and after it."""
    console.print()
    console.print(table)
    console.print()


def _render_ways(result: dict[str, Any], console: Console) -> None:
    """Compare synchronous SGD, islands and a parameter server, and name the cheapest number of devices."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    priced = any(way["price"] for way in result["ways"])
    price = "price" if any(way["minutes"] for way in result["ways"]) else A_MILLION
    for name in ("way", "how", "k/s", "time", *([price] if priced else [])):
        table.add_column(name, justify="left" if name in ("way", "how") else "right", no_wrap=name != "how")
    for way in result["ways"]:
        table.add_row(
            way["method"],
            way["label"],
            _thousands(way["samples_s"]),
            spoken_minutes(way["minutes"]) if way["minutes"] else "-",
            *([f"{way['price']:,.2f}" if way["price"] else "-"] if priced else []),
        )
    _set_apart(console, table)
    for sentence in way_sentences(result):
        console.print(sentence)


def way_sentences(result: dict[str, Any]) -> Iterator[str]:
    """The recommended way, how to set it up, and the cheapest number of devices."""
    yield f"Recommended: {result['recommended']['method']}, since {result['recommended']['why']}."
    yield from (way["advice"] for way in result["ways"] if way["advice"])
    if found := result.get("cheapest"):
        unit = f"in {spoken_minutes(found['minutes'])}" if found["minutes"] else "a million samples"
        yield f"Cheapest: {spoken_devices(found['devices'])} for {found['price']:,.2f} {unit} ({found['label']})."


def priced_way(way: dict[str, Any]) -> str:
    """One way in a sentence: how fast it is, and what it costs if a price is known.

    >>> priced_way({"method": "downpour", "samples_s": 5e5, "minutes": 2.5, "price": 4.0, "label": "8 servers"})
    'downpour (8 servers): 500,000 samples a second, 2.5 min, price 4.00.'
    """
    price = f", price {way['price']:,.2f}{'' if way['minutes'] else ' a million samples'}" if way["price"] else ""
    time = f", {spoken_minutes(way['minutes'])}" if way["minutes"] else ""
    return f"{way['method']} ({way['label']}): {way['samples_s']:,.0f} samples a second{time}{price}."


def _choices(rows: list[dict[str, Any]], width: int, *, with_gpus: bool) -> Any:
    """A ranking as a table; the least informative columns are left out until the rest fits."""
    from rich.table import Table

    columns: dict[str, list[str]] = {}
    for row in rows:
        grid = f" {row['grid'][0]}x{row['grid'][1]}" if row["grid"] else ""
        cells = {
            **({"gpus": f"{row['gpus']:,}"} if with_gpus else {}),
            "collective": row["collective"] + grid,
            "codec": row["codec"],
            "batch": f"{row['batch']:,}",
            "ms/step": f"{row['step_ms']:.2f}",
            "k/s": _thousands(row["samples_per_s"]),
            "eff.": f"{100 * row['efficiency']:.0f} %",
            "epochs": f"{row['epochs']:.0f}" if row["epochs"] else "-",
            "time": spoken_minutes(row["minutes"]) if row["minutes"] else "-",
            **({"price" if row["minutes"] else A_MILLION: f"{row['price']:,.2f}"} if row.get("price") else {}),
            "waits for": row["bottleneck"],
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    for name in ("k/s", "waits for", "epochs", "eff."):
        if sum(max(map(len, (name, *cells))) + 2 for name, cells in columns.items()) - 2 <= width:
            break
        columns.pop(name, None)
    table = Table(box=None, pad_edge=False, title="sweep" if with_gpus else None)
    for name in columns:
        left = name in ("collective", "codec", "waits for")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for line in zip(*columns.values(), strict=True):
        table.add_row(*line)
    return table


def spoken_minutes(minutes: float) -> str:
    """A time in the most readable unit."""
    if minutes < 2:
        return f"{minutes * 60:.1f} s"
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def spoken_devices(count: int) -> str:
    """A number of devices, with the right plural."""
    return f"{count:,} device{'' if count == 1 else 's'}"


def _figure(number: float, places: int) -> str:
    """A number with this many decimal places, or with two digits if it is too small for them.

    >>> _figure(1817.02, 1), _figure(0.0138, 1)
    ('1,817.0', '0.014')
    """
    return f"{number:,.{places}f}" if number >= 10.0**-places or number == 0 else f"{number:.2g}"


def _thousands(rate: float) -> str:
    """Samples a second, in thousands: a laptop has a few, a cluster millions."""
    return f"{rate / 1e3:,.1f}" if rate >= 1e3 else f"{rate / 1e3:.3g}"


def spoken_goal(result: dict[str, Any]) -> str:
    """The accuracy that is reached and the time it takes; empty if no law of epochs is known.

    A law gives the epochs to one accuracy. If a lower one was asked for, that time is an upper bound.
    """
    minutes, target, asked = result["best"]["minutes"], result["target"], result["asked"]
    if not minutes:
        return ""
    if asked and asked < target:
        return f"{asked:g} % in at most {spoken_minutes(minutes)}, which is the time to {target:g} %"
    return f"{target:g} % in {spoken_minutes(minutes)}"


def crossover_sentence(result: dict[str, Any]) -> str:
    """Whether 1-bit pays on this network, and below which rate it does."""
    found = result["crossover"]
    if found is None:
        return "Compression: nothing leaves the node, so there is nothing to gain."
    gain = f"{100 * abs(found['gain_here']):.1f} % {'less' if found['gain_here'] > 0 else 'more'} time"
    return (
        f"Compression: at the {found['here_gbit_s']:g} Gbit/s of this network, a step with 1-bit codes takes {gain} "
        f"than with {found['plain']}; it takes less {spoken_rate(found['gbit_s'], ' Gbit/s per adapter')}."
    )


def _render_validation(result: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("system", "quantity"):
        table.add_column(name)
    for name in ("published", "predicted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("counts")
    for row in result["rows"]:
        style = "" if row["role"] == "predicted" else "dim"
        table.add_row(
            row["system"],
            row["quantity"],
            f"{row['published']:,.4g} {row['unit']}",
            f"{row['predicted']:,.4g}",
            f"{100 * row['error']:+.1f} %",
            "yes" if row["role"] == "predicted" else row["role"],
            style=style,
        )
    console.print(table)
    for row in result["rows"]:
        if row["note"]:
            console.print(f"[dim]{row['system']}, {row['quantity']}: {row['note']}.[/dim]")
    summary = result["summary"]
    console.print(
        f"[bold]{summary['predicted']} rows count: mean error {100 * summary['mean_error']:.1f} %, worst "
        f"{100 * summary['worst_error']:.1f} %[/bold]. {summary['sets_a_constant']} do not count because a constant of "
        f"the model was set by them, {summary['contradicted']} because their own paper contradicts them. Sources of "
        "constants: --json."
    )


def _render_local(result: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("run", "measured ms", "predicted ms", "error"):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["name"], f"{row['measured_ms']:.1f}", f"{row['predicted_ms']:.1f}", f"{100 * row['error']:+.1f} %"
        )
    console.print(table)
    summary = result["summary"]
    console.print(
        f"[bold]{summary['runs']} runs: mean error {100 * summary['mean_error']:.1f} %, worst "
        f"{100 * summary['worst_error']:.1f} %[/bold]"
    )
    for found in result.get("crossovers", []):
        console.print(local_crossover_sentence(found))


def local_crossover_sentence(found: dict[str, Any]) -> str:
    """The rate at which 1-bit and a dense exchange take equally long on shaped links, measured and predicted."""
    measured, predicted = (
        f"{found[key]:.0f} Mbit/s" if found[key] else "none" for key in ("measured_mbit_s", "predicted_mbit_s")
    )
    error = f" ({100 * found['error']:+.1f} %)" if found["error"] is not None else ""
    return (
        f"Crossover of 1-bit and the {found['dense']} exchange, {found['model']} on {found['world']} hosts, buckets of "
        f"{found['bucket_mb']:g} MB: measured {measured}, predicted {predicted}{error}"
    )

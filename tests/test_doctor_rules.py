"""The rules of the doctor on recorded facts: every miniature of the gallery, every right twin, and altered records.

The archive holds what `benchmarks/doctor/run.py --facts` recorded on two CPU cores.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from bigstep.doctor.examination import Examination, diagnose, load_case
from bigstep.doctor.facts import KINDS, Backward, Event, Update, Weights, Wrap
from bigstep.doctor.finding import Case
from bigstep.doctor.findings import RULES
from bigstep.doctor.report import print_report, verdict, write_page
from bigstep.doctor.world import Process, World, load_world, write_world

ROOT = Path(__file__).parents[1]
ARCHIVE = Path(__file__).parent / "data" / "doctor.zip"
EXPECTED: dict[str, str] = json.loads((ROOT / "benchmarks" / "doctor" / "expected.json").read_text())
NAMES = {rule.__name__.replace("_", "-") for rules in RULES.values() for rule in rules}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


def judge(folder: Path) -> Examination:
    assert folder.is_dir(), "not recorded: benchmarks/doctor/run.py --facts"  # nothing seen would be nothing wrong
    case = load_case(folder)
    return diagnose(case, folder.name, runs=[world for world in (case.one, case.many) if world])


@pytest.mark.parametrize("script", sorted(EXPECTED))
def test_the_cause_of_a_miniature_is_named_first(records: Path, script: str) -> None:
    findings = judge(records / script).findings
    assert findings, "nothing was found"
    assert findings[0].name == EXPECTED[script]


@pytest.mark.parametrize("script", sorted(EXPECTED))
def test_a_right_twin_has_no_fault(records: Path, script: str) -> None:
    result = judge(records / f"{script}_right")
    assert not result.faults, [f"{finding.name}: {finding.evidence}" for finding in result.faults]
    assert EXPECTED[script] not in {finding.name for finding in result.findings}, "the cure leaves no advice either"


def test_a_line_of_the_script_comes_with_nearly_every_fault(records: Path) -> None:
    faults = [judge(records / script).faults[:1] for script in EXPECTED]
    lines = [found[0].line for found in faults if found]
    named = [line for line in lines if re.fullmatch(r"[\w/]+\.py:\d+", line)]
    assert len(named) >= 0.9 * len(lines)


def test_every_rule_says_what_it_needs_when_it_has_seen_nothing() -> None:
    result = diagnose(Case(), "train.py")
    assert not result.findings
    assert set(result.unseen) == NAMES
    assert all(reason and "stumbled" not in reason for reason in result.unseen.values())


def test_every_rule_bears_a_run_that_ended_before_it_trained() -> None:
    empty = World([Process([], 0, 2), Process([], 1, 2)], ended="failed", message="it fell over")
    result = diagnose(Case(one=World([Process([], 0, 1)]), many=empty, short=empty), "train.py", runs=[empty])
    assert not [name for name, reason in result.unseen.items() if "stumbled" in reason]
    assert result.trouble == "it fell over"


def altered(case: Case, change: dict[type[Event], dict[str, object]], begin: int = 0) -> Case:
    """The same case with some fields of some events set to other values, on all ranks from `begin` on."""
    assert case.many is not None
    ranks = [
        Process([replace(e, **change[type(e)]) if type(e) in change else e for e in p.events], p.rank, p.world)  # type: ignore[arg-type]
        if p.rank >= begin
        else p
        for p in case.many.ranks
    ]
    return replace(case, many=replace(case.many, ranks=ranks))


def names(case: Case) -> list[str]:
    return [finding.name for finding in diagnose(case, "train.py").faults]


def test_a_search_for_unused_parameters_is_needless_only_if_all_are_used(records: Path) -> None:
    case = load_case(records / "divided_twice_right")
    assert names(altered(case, {Wrap: {"find_unused": True}})) == ["needless-search"]
    assert names(altered(case, {Wrap: {"find_unused": True}, Update: {"untouched": 1}})) == []


@pytest.mark.parametrize(
    "script, change", [("stale_optimizer", {}), ("divided_twice_right", {Wrap: {"find_unused": True}})]
)
def test_updates_are_counted_once_not_once_a_rank(
    records: Path, script: str, change: dict[type[Event], dict[str, object]]
) -> None:
    told = diagnose(altered(load_case(records / script), change), "train.py").faults[0].evidence
    assert re.search(r"in (?:all )?5 updates", told), told


def test_a_head_that_ddp_does_not_know_is_told_as_one(records: Path) -> None:
    found = judge(records / "late_head").findings[0]
    assert "before DistributedDataParallel wraps the module" in found.remedy
    assert found.line == "late_head.py:26", "where it is wrapped"


def test_a_sum_over_ranks_is_no_fault_where_the_loss_was_divided_first(records: Path) -> None:
    summed = load_case(records / "summed")
    assert names(summed) == ["scaled-gradients"]
    assert names(altered(summed, {Backward: {"factor": 0.5}})) == []


def test_a_missing_exchange_comes_before_a_different_start(records: Path) -> None:
    """A script for one device seeds nothing, so its ranks start apart too; a seed alone would not help it."""
    alone = load_case(records / "spawn_alone")
    findings = diagnose(altered(alone, {Weights: {"parameters": "others"}}, begin=1), "train.py").faults
    assert [finding.name for finding in findings[:2]] == ["unexchanged-gradients", "different-start"]
    assert "applied as if they came from one" not in findings[1].cost, "nothing of another rank is applied here"


def test_the_share_of_a_step_is_that_of_the_times_beside_it(records: Path) -> None:
    for first_waits in (0.09, 0.07):  # more than the other rank, and less
        case = altered(load_case(records / "slow_input"), {Update: {"input_s": first_waits, "total_s": 0.1}})
        case = altered(case, {Update: {"input_s": 0.04, "total_s": 0.05}}, begin=1)
        evidence = next(f.evidence for f in diagnose(case, "train.py").faults if f.name == "slow-input")
        share, wait, total = map(float, re.findall(r"\d+(?:\.\d+)?", evidence)[:3])
        assert share == pytest.approx(100 * wait / total, abs=0.5), "a share is shown without decimals"


def test_records_survive_writing_and_reading(records: Path, tmp_path: Path) -> None:
    world = load_world(records / "numpy_workers" / "many.jsonl")
    write_world(world, tmp_path / "again.jsonl")
    again = load_world(tmp_path / "again.jsonl")
    assert again.ranks == world.ranks
    assert again.helpers == world.helpers


def test_the_page_holds_every_finding_and_loads_nothing(records: Path, tmp_path: Path) -> None:
    result = judge(records / "no_sampler")
    write_page(result, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert result.findings[0].title in page
    assert all(name in page for name in result.unseen)
    assert "http://" not in page
    assert "https://" not in page


def test_the_terminal_says_fault_cost_and_change(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = judge(records / "no_sampler")
    print_report(result)
    text = capsys.readouterr().out
    assert "1. every rank trains on the whole data set" in text
    assert "DistributedSampler" in text
    assert verdict(result).split(",")[0] in text


def test_the_document_lists_every_finding_and_every_miniature() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text()
    listed = set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE))
    assert listed == NAMES
    for script in EXPECTED:
        assert script in text, f"{script} is in the gallery, but not in docs/doctor.md"


def test_the_gallery_holds_what_it_promises() -> None:
    paths = [path for path in (ROOT / "examples" / "doctor").glob("*.py") if path.stem != "small"]
    scripts = {path.stem: path.read_text() for path in paths}
    assert set(scripts) == set(EXPECTED)
    assert len(scripts) >= 30
    for name, source in scripts.items():
        assert re.search(r"^Reported as [\w.-]+/[\w.-]+ \d+\.$", source, re.MULTILINE), f"{name} names no thread"
        assert "--right" in source
    styles = ("mp.spawn", "from accelerate", "import lightning", "from transformers", "DistributedDataParallel(")
    assert all(any(style in source for source in scripts.values()) for style in styles)
    assert len(KINDS) == len(Event.__subclasses__())

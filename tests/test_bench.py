"""`bigstep bench`: suites expand to fair runs, finished ones are not run again, failures are rows, differences show."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import yaml

from bigstep import recipes
from bigstep.bench.ablation import TECHNIQUES, techniques_of
from bigstep.bench.command import bench_command, planned_trials
from bigstep.bench.folders import mark, prepare, state_of
from bigstep.bench.own_suite import EXAMPLE, read_suite
from bigstep.bench.planned import Planned
from bigstep.bench.runner import run_all
from bigstep.bench.suites import SUITES, Options, batch_settings, planned_runs
from bigstep.bench.tuning import HOLDOUT, SPACES, choose, trials_of
from bigstep.bench.watch import Watch
from bigstep.config import RunConfig
from bigstep.config.edit import finish_on_one, flatten
from bigstep.config.text import apply_settings, config_to_mapping
from bigstep.engine.rates import learning_rate
from bigstep.errors import ConfigError
from bigstep.records import read_run
from bigstep.report.gather import gather
from bigstep.report.study import study_of
from bigstep.report.table import to_markdown
from bigstep.train import fit

# a network without batch norm on 2,400 images, 256 a step in two forwards: a fraction of a second
TINY = (
    "model=mlp", "data.holdout=0.8", "data.augment=none", "workers.count=2", "workers.local_batch=128", "lr.base=0.05",
    "evaluate_every=100",
)  # fmt: skip


def tiny(label: str, *settings: str, seed: int = 0, epochs: float = 4) -> Planned:
    return Planned(label=label, recipe="plain", settings=(*TINY, *settings), epochs=epochs, seed=seed)


# ---- suites as data ----


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("quick", [True, False])
def test_every_run_of_a_suite_is_valid_and_has_a_folder_of_its_own(name: str, quick: bool) -> None:
    runs = planned_runs(SUITES[name], Options(quick=quick))
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    assert {run.seed for run in runs} == ({0} if quick else {0, 1, 2})
    assert len({run.config().epochs for run in runs}) == 1  # the same samples for all
    assert all(run.config().data.holdout == 0 for run in runs)


def test_the_suite_of_seeds_holds_every_recipe_and_a_run_that_finishes_on_one() -> None:
    runs = planned_runs(SUITES["seeds"], Options(seeds=1))
    assert [run.recipe for run in runs] == [*recipes.SYNCHRONOUS, *recipes.ASYNCHRONOUS, "plain"]
    assert runs[-1].config().plan[-1].count == 1
    assert {run.procs for run in runs if run.recipe in recipes.SYNCHRONOUS} == {2}
    assert {run.procs for run in runs if run.recipe in recipes.ASYNCHRONOUS} == {1}


def test_the_suite_of_islands_varies_h_and_count_beside_a_synchronous_run() -> None:
    runs = planned_runs(SUITES["islands"], Options(seeds=1))
    assert runs[0].config().islands.count == 1
    seen = {(run.recipe, run.config().islands.count, run.config().islands.every) for run in runs[1:]}
    assert {each for each in seen if each[0] == "diloco"} == {("diloco", m, h) for m in (2, 4) for h in (1, 5, 20, 50)}
    assert len(runs) == 1 + 8 + 6, "what travels for two steps cannot meet in every one"
    samples = {run.config().epochs * run.config().batch for run in runs}
    assert len(samples) == 1
    images = planned_runs(SUITES["islands"], Options(seeds=1, recipes=("localsgd",), epochs=2))
    assert [run.recipe for run in images[:2]] == ["plain", "localsgd"]


def test_recipes_and_settings_narrow_a_suite() -> None:
    options = Options(seeds=2, recipes=("sony", "fair"), settings=("model=mlp",), epochs=3)
    runs = planned_runs(SUITES["seeds"], options)
    assert [(run.recipe, run.seed) for run in runs] == [("sony", 0), ("fair", 0), ("sony", 1), ("fair", 1)]
    assert all((run.config().model, run.config().epochs) == ("mlp", 3) for run in runs)
    with pytest.raises(ConfigError, match="did you mean 'sony'"):
        planned_runs(SUITES["seeds"], Options(recipes=("sonny",)))
    with pytest.raises(ConfigError, match="none that islands compares"):
        planned_runs(SUITES["islands"], Options(recipes=("plain",)))
    with pytest.raises(ConfigError, match="by itself"):
        planned_runs(SUITES["seeds"], Options(settings=("seed=7",)))


def test_no_run_is_planned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(planned_runs(SUITES["seeds"], Options(seeds=1, recipes=("sony", "sony")))) == 1
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # where one replica and one a core are the same
    names = [run.name for run in planned_runs(SUITES["async"], Options(seeds=1))]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("epochs", [0.5, 1.0])
def test_a_suite_of_an_epoch_or_less_finishes_on_one_worker_in_its_second_half(epochs: float) -> None:
    last = planned_runs(SUITES["seeds"], Options(seeds=1, epochs=epochs))[-1]
    assert (last.finish_on_one, last.config().plan[-1].count) == (epochs / 2, 1)


def test_what_is_typed_has_every_digit_of_what_is_planned() -> None:
    run = Planned(label="plain", recipe="plain", epochs=4 / 3, finish_on_one=1 / 3)
    words = run.arguments()
    typed = [float(words[words.index(name) + 1]) for name in ("--epochs", "--finish-on-one")]
    assert typed == [4 / 3, 1 / 3]  # a folder that holds 1.33333 epochs is that of another experiment


def test_a_larger_preset_takes_the_recipes_that_have_it_with_batches_of_its_own() -> None:
    options = Options(seeds=1, preset="cifar10")
    assert {run.recipe for run in planned_runs(SUITES["seeds"], options)} == set(recipes.SYNCHRONOUS)
    for run in planned_runs(SUITES["batch"], options):
        config = run.config()
        largest = max(stage.count * stage.local_batch for stage in (config.workers, *config.plan))
        assert f"batch {largest}" == run.variant
    with pytest.raises(ConfigError, match="no recipe of seeds has; choose from cifar10, mini"):
        planned_runs(SUITES["seeds"], Options(preset="cifar"))


@pytest.mark.parametrize("recipe", recipes.SYNCHRONOUS)
def test_a_batch_of_its_own_leaves_a_recipe_as_it_is_and_others_scale_the_rate(recipe: str) -> None:
    base = recipes.load(recipe)
    same, large = (apply_settings(base, batch_settings(base, base.batch * factor)) for factor in (1, 4))
    assert (same.workers, same.plan, large.batch) == (base.workers, base.plan, 4 * base.batch)

    def peak(config: RunConfig) -> float:
        rate = learning_rate(config.lr, config.batch)
        return max(rate(epoch / 10, config.batch) for epoch in range(10 * int(config.epochs)))

    assert peak(same) == pytest.approx(peak(base))
    factor = 2 if base.optimizer.name == "lars" or recipe == "onebit" else 4
    assert peak(large) == pytest.approx(factor * peak(base))


# ---- ablation ----


@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_each_ablation_switches_off_exactly_one_technique(recipe: str) -> None:
    base = recipes.load(recipe)
    used = [technique.name for technique in techniques_of(base)]
    for technique in techniques_of(base):
        left = [other.name for other in techniques_of(apply_settings(base, technique.off(base)))]
        gone = [name for name in used if name not in left]
        expected = [technique.name]
        if technique.name == "codec onebit":
            expected.append("error feedback")  # there is nothing to feed back without the codec
        if technique.name == "LARS":
            left = [name for name in left if name != "linear LR scaling"]  # SGD brings the rule for its rate
        assert (gone, set(left) <= set(used)) == (expected, True)


def test_the_settings_of_an_ablation_touch_its_technique_only() -> None:
    base = recipes.load("sony")
    changed = {}
    for technique in techniques_of(base):
        off = apply_settings(base, technique.off(base))
        before, after = (dict(flatten(config_to_mapping(config))) for config in (base, off))
        changed[technique.name] = {field for field in before if before[field] != after.get(field)}
    assert changed == {
        "warm-up": {"lr.schedule"},
        "LARS": {"optimizer.name", "optimizer.trust_coefficient", "optimizer.eps", "lr.base", "lr.scaling"},
        "label smoothing": {"loss.label_smoothing"},
        "batch-size control": {"plan"},
        "last-batch statistics": {"norm.statistics"},
        "zero gamma": {"norm.zero_gamma"},
        "codec fp16": {"exchange.codec"},
        "collective torus": {"exchange.collective"},
    }


def test_without_warm_up_the_decay_keeps_its_place() -> None:
    base = recipes.load("lars")
    warm_up = next(technique for technique in TECHNIQUES if technique.name == "warm-up")
    off = apply_settings(base, warm_up.off(base))
    full, cut = learning_rate(base.lr, base.batch), learning_rate(off.lr, off.batch)
    assert [cut(epoch, 0) for epoch in (0, 1, 2.9)] == [8.0] * 3
    assert [cut(epoch, 0) for epoch in (3, 10, 19)] == [full(epoch, 0) for epoch in (3, 10, 19)]


# ---- finish on one ----


def test_finishing_on_one_worker_lowers_batch_and_rate_together() -> None:
    base = recipes.load("plain")
    config = finish_on_one(base, 2)
    rate, before = learning_rate(config.lr, config.batch, config.plan), learning_rate(base.lr, base.batch)
    assert rate(17.9, 1024) == before(17.9, 1024)
    assert rate(18.5, 32) == pytest.approx(before(18.5, 1024) / 32)
    assert finish_on_one(config, 2) == config  # as a resumed run resolves it
    grown = finish_on_one(recipes.load("sony"), 2)  # 1,024, then 2,048, then 32
    assert grown.plan[-1].rate == pytest.approx(32 / 2048)
    for epochs in (0, 20):
        with pytest.raises(ConfigError, match="must be more than 0 and less than epochs .20."):
            finish_on_one(base, epochs)
    with pytest.raises(ConfigError, match="synchronous runs"):
        finish_on_one(recipes.load("hogwild"), 2)


# ---- tuning ----


def test_every_recipe_gets_the_same_trials_on_held_out_images() -> None:
    for recipe in recipes.NAMES:
        trials = trials_of(Planned(label=recipe, recipe=recipe), 6)
        configs = [trial.config() for trial in trials]
        assert len({trial.settings for trial in trials}) == len({trial.name for trial in trials}) == 6
        assert all(config.data.holdout == pytest.approx(HOLDOUT, rel=1e-5) for config in configs)
        own = recipes.load(recipe)
        assert dataclasses.replace(configs[0], data=own.data) == own  # the first is the recipe itself
    assert {len(space) for space in SPACES.values()} == {2}
    with pytest.raises(ConfigError, match="hold 15 points"):
        trials_of(Planned(label="plain", recipe="plain"), 16)


def test_tuning_is_for_all_that_take_part_and_for_nobody_else() -> None:
    assert set(planned_trials(SUITES["islands"], Options(), 2)) == {"adamw", "diloco", "streaming"}
    cifar = planned_trials(SUITES["seeds"], Options(preset="cifar10"), 2)
    assert set(cifar) == set(recipes.SYNCHRONOUS)  # the others have no such preset
    assert {len(trials) for trials in cifar.values()} == {2}


def test_tuning_takes_the_best_trial_and_the_recipe_itself_where_all_failed() -> None:
    trials = trials_of(Planned(label="plain", recipe="plain"), 3)
    assert choose(trials, {trials[0].name: 0.8, trials[2].name: 0.9}) == ("lr.base=0.1", "optimizer.weight_decay=0.002")
    assert choose(trials, {}) == ("lr.base=0.2", "optimizer.weight_decay=0.002")


# ---- a suite of one's own ----


def test_a_suite_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(EXAMPLE)
    runs = read_suite(file, Options())
    assert len(runs) == 9
    assert {run.label for run in runs} == {"plain", "ten times the rate", "sony"}
    assert next(run for run in runs if run.label != run.recipe).config().lr.base == 2.0
    for text, told in (
        ("{}", "list of runs"), ("- {recipe: sonny}", "did you mean 'sony'"), ("- {recipe: sony, sed: 1}", "'seeds'"),
        ("- {recipe: sony, seeds: many}", "seeds takes a whole number"), ("- {seeds: 1}", "lacks the field 'recipe'"),
        ("- {recipe: sony, seeds: 0}", "seeds is 0"), ("- {recipe: sony}\n- {recipe: sony}", "another `name:`"),
        ("- {recipe: plain, set: {lr.bse: 1}}", "lr.base"), ("- [", "not valid YAML"),
        ("- {recipe: plain, set: {lr.base: 2020-01-01}}", "2020-01-01, which no field takes"),
        ("- {recipe: plain, seeds: 1000000000}", "must be 1 to 1,000"), ("[" * 5_000, "not valid YAML"),
        ("- &a {recipe: plain}\n- *a", "aliases"), ("- {recipe: plain, set: {seed: 5}}", "by itself"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_suite(file, Options())
    with pytest.raises(ConfigError, match="Unknown suite 'sseeds': did you mean 'seeds'"):
        bench_command("sseeds", Options(), out=tmp_path)
    file.write_text("- {recipe: plain, name: 大步}\n- {recipe: plain, name: 小步}")
    assert {run.name for run in read_suite(file, Options(seeds=1))} == {"大步-seed0", "小步-seed0"}
    with pytest.raises(ConfigError, match="lists its runs itself"):
        bench_command(str(file), Options(recipes=("sony",)), out=tmp_path / "out")


# ---- running ----


def test_a_folder_with_files_of_somebody_else_is_never_cleared(tmp_path: Path) -> None:
    run = Planned(label="plain", recipe="plain")
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds thesis.txt, which no run wrote"):
        prepare(run, tmp_path / run.name, "new")
    assert (tmp_path / run.name / "thesis.txt").read_text() == "mine"


def unfinish(folder: Path) -> None:
    """Make a finished run look as if it had been killed after its last checkpoint."""
    facts = json.loads((folder / "run.json").read_text())
    del facts["result"]
    (folder / "run.json").write_text(json.dumps(facts))


def test_finished_runs_stay_an_unfinished_one_goes_on_and_a_crash_is_a_row(tmp_path: Path) -> None:
    done, cut = tiny("done"), tiny("cut", seed=1)
    crash = tiny("crash", "workers.count=125")
    fit(done.config(), out=tmp_path / done.name)
    fit(cut.config(), out=tmp_path / cut.name, max_steps=20)
    unfinish(tmp_path / cut.name)
    assert [state_of(run, tmp_path / run.name) for run in (done, cut, crash)] == ["finished", "unfinished", "new"]
    before = (tmp_path / done.name / "run.json").stat().st_mtime_ns
    shown = io.StringIO()
    finished = run_all([done, crash, cut], "mine", tmp_path, Watch("mine", shown, live=False), device="cpu")
    assert [each.skipped for each in finished] == [True, False, False]
    assert (tmp_path / done.name / "run.json").stat().st_mtime_ns == before
    assert finished[1].failure is not None
    assert "larger than the training set" in finished[1].failure
    resumed = read_run(tmp_path / cut.name)
    assert "Resumed at step 20." in resumed.notes
    assert resumed.result["steps"] == 40
    lines = shown.getvalue().splitlines()
    assert "1 of them already finished" in lines[0]
    assert "FAILED" in lines[1]
    study = study_of(gather([tmp_path]))
    assert {outcome.name: outcome.status for outcome in study.outcomes} == {
        "plain": "finished", "crash": "failed", "cut": "finished",
    }  # fmt: skip
    assert any("crash failed: The batch of 16000 samples" in sentence for sentence in study.sentences())
    again = run_all([done, crash, cut], "mine", tmp_path, Watch("mine", io.StringIO(), live=False), device="cpu")
    assert all(each.skipped for each in again)
    with pytest.raises(ConfigError, match="other settings"):
        state_of(tiny("done", "lr.base=0.06"), tmp_path / done.name)


def test_time_left_is_what_runs_of_the_kind_took() -> None:
    one, other = tiny("one"), tiny("other")
    watch = Watch("mine", io.StringIO(), live=False)
    watch.plan([one, other, tiny("one", seed=1)], ["new"] * 3, Path("nowhere"))
    assert watch.seconds_left() is None
    watch.begin(one, Path("nowhere"))
    watch.end(one, Path("nowhere"), 10.0, "crashed")  # tells nothing about how long others take
    assert watch.seconds_left() is None
    watch._walls = {"one ": [20.0], "third ": [40.0]}
    assert watch.seconds_left() == pytest.approx(30.0 + 20.0)  # the mean of all for a kind not seen yet


# ---- what a suite shows ----


def test_planted_differences_show_and_identical_recipes_do_not(tmp_path: Path) -> None:
    groups = {"one": (), "other": (), "tenfold": ("lr.base=0.5",), "half": ("data.holdout=0.9",)}
    for label, settings in groups.items():
        for seed in range(3):
            run = tiny(label, *settings, seed=seed, epochs=6)
            try:
                fit(run.config(), out=tmp_path / run.name)
                failure = None
            except RuntimeError as error:  # ten times the rate may end in no number at all
                failure = str(error)
            mark(run, tmp_path / run.name, "mine", 1.0, failure)
    study = study_of(gather([tmp_path]))
    said = " ".join(study.sentences())
    assert study.groups[0].label in ("one", "other")
    assert f"Not distinguishable from it with these seeds: {({'one', 'other'} - {study.groups[0].label}).pop()}" in said
    tenfold = next(group for group in study.groups if group.label == "tenfold")
    assert tenfold.failures or "tenfold (" in said.partition("points behind:")[2]
    assert "half (7,200)" in said.partition("Not on equal terms: most groups saw 14,400 samples, but")[2]


def test_ablations_are_told_as_what_each_technique_brings(tmp_path: Path) -> None:
    for label, settings in {"plain": (), "plain without warm-up": ("lr.base=0.0005",)}.items():
        for seed in range(3):
            run = tiny(label, *settings, seed=seed)
            fit(run.config(), out=tmp_path / run.name)
            mark(run, tmp_path / run.name, "ablation", 1.0)
    study = study_of(gather([tmp_path]))
    (effect,) = study.effects
    assert (effect.system, effect.technique, effect.verdict) == ("plain", "warm-up", "apart")
    assert effect.brings is not None
    assert effect.brings > 0.1
    assert "Of 1 technique left out in turn, 1 made a difference" in " ".join(study.sentences())
    assert "| plain | warm-up | +" in to_markdown(study)


def test_the_command_compares_what_is_there_and_leaves_page_and_tables(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    settings = {path: yaml.safe_load(text) for path, text in (setting.split("=") for setting in TINY)}
    entries = [
        {"recipe": "plain", "name": name, "epochs": 2, "seeds": 1, "procs": 1, "set": {**settings, "lr.base": rate}}
        for name, rate in (("slow", 0.01), ("fast", 0.05))
    ]
    file.write_text(json.dumps(entries))  # JSON is YAML
    runs = read_suite(file, Options())
    for run in runs:
        fit(run.config(), out=tmp_path / "out" / "mine" / run.name)
        mark(run, tmp_path / "out" / "mine" / run.name, "mine", 1.0)
    told = bench_command(str(file), Options(), out=tmp_path / "out", quiet=True)
    assert json.loads(json.dumps(told)) == told
    assert (told["suite"], told["ran"], told["failures"]) == ("mine", 0, {})
    assert {row["group"] for row in told["runs"]} == {"slow", "fast"}
    for name in ("report.html", "results.csv", "results.md"):
        assert "fast" in (tmp_path / "out" / "mine" / name).read_text()

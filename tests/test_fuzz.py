"""A sample of benchmarks/fuzz: mutated input is read, or refused with one sentence, in bounded time and memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "fuzz"
SAMPLE = {
    "configurations": 15, "suites": 40, "clusters": 6, "records": 40, "checkpoints": 15, "store messages": 40,
    "calls of replicas": 30,
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLE)
def test_mutated_input_is_read_or_refused_with_one_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARK)
    import run

    found = run.fuzz(kind, SAMPLE[kind], 1, tmp_path / "files")
    assert found["faults"] == []
    assert found["read"] + found["refused"] == SAMPLE[kind]
    if kind in ("configurations", "suites", "clusters", "checkpoints"):
        assert found["refused"], "the mutations harm nothing"


def test_the_judge_finds_tracebacks_slowness_and_sentences_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK)
    import run

    from bigstep.errors import ConfigError

    def says(error: BaseException | None) -> str:
        def case(_: random.Random) -> None:
            if error is not None:
                raise error

        return str(run.judge(case, random.Random(0))[0])

    assert says(None) == "read"
    assert says(ConfigError("lr.base is x, but it takes a number.")) == "refused"
    for bad in (ConfigError("two\nlines"), ConfigError("x" * 601), ConfigError(""), KeyError("x"), MemoryError()):
        assert says(bad) == "fault"
    monkeypatch.setattr(run, "SECONDS", 0.05)

    def endless(_: random.Random) -> None:
        with run.bounded():
            while True:
                pass

    with run.bounded():
        assert run.judge(endless, random.Random(0)) == ("fault", "not done after 0.05 s")

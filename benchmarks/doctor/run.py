"""Examine every miniature of examples/doctor and its right twin, and count what was named and what was alarmed about.

python benchmarks/doctor/run.py                 # all of them; half an hour on two cores
python benchmarks/doctor/run.py no_sampler      # some
python benchmarks/doctor/run.py --facts FOLDER  # keep the facts; with --again, judge kept facts anew
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bigstep.doctor.examination import Examination, diagnose, examine, load_case

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "doctor"
EXPECTED: dict[str, str] = json.loads((HERE / "expected.json").read_text())


def judge(script: str, right: bool, facts: Path | None, again: bool) -> Examination:
    arguments = [f"{script}.py", *(["--right"] if right else [])]
    kept = facts / f"{script}{'_right' if right else ''}" if facts else None
    if again and kept and kept.exists():
        case = load_case(kept)
        return diagnose(case, " ".join(arguments), runs=[world for world in (case.one, case.many) if world])
    return examine(arguments, keep=kept)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scripts", nargs="*", default=sorted(EXPECTED))
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = options.facts.resolve() if options.facts else None
    out = options.out.resolve() if options.out else None
    os.chdir(EXAMPLES)
    rows = []
    for script in options.scripts:
        row: dict[str, object] = {"script": script, "expected": EXPECTED[script]}
        for right in (False, True):
            result = judge(script, right, facts, options.again)
            names = [f"{f.name}{'' if f.level == 'fault' else ' (advice)'}" for f in result.findings]
            trouble = result.trouble
            row["right" if right else "wrong"] = names + ([f"trouble: {trouble}"] if trouble else [])
            if result.seconds:  # facts that are judged again took no time
                row["seconds_right" if right else "seconds"] = round(result.seconds, 1)
        named = [name.removesuffix(" (advice)") for name in row["wrong"]]  # type: ignore[attr-defined]
        row["named_first"] = bool(named) and named[0] == EXPECTED[script]
        alarms = [n for n in row["right"] if "(advice)" not in n]  # type: ignore[attr-defined]
        row["false_alarms"] = alarms
        print(
            f"{'ok ' if row['named_first'] and not alarms else 'BAD'} {script}: {row['wrong']} | right {row['right']}",
            flush=True,
        )
        rows.append(row)
    named = sum(bool(row["named_first"]) for row in rows)
    false = sum(bool(row["false_alarms"]) for row in rows)
    print(f"{named} of {len(rows)} named first; false alarms on {false} of {len(rows)} right twins")
    if out:
        out.write_text(
            json.dumps({"named_first": named, "of": len(rows), "false_alarms": false, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

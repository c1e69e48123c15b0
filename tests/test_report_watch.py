"""`bigstep report --watch`: a page that follows runs, on this machine alone, and serves nothing else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bigstep.records import locked
from bigstep.report.watch import Watch
from test_report import write_run


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    (tmp_path / "runs").mkdir()
    (tmp_path / "secret.txt").write_text("nobody's business")
    with Watch([tmp_path / "runs"]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(watch: Watch, path: str, host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", watch.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{watch.server_port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_follows_the_records(watch: Watch, tmp_path: Path) -> None:
    status, page = ask(watch, "/")
    assert status == 200
    assert "holds no run folder" in page
    assert "reload by itself" in page
    state = json.loads(ask(watch, "/state")[1])["state"]
    assert f'const shown = "{state}"' in page
    folder = write_run(tmp_path / "runs" / "one", recipe="sony", finished=False)
    newer = json.loads(ask(watch, "/state")[1])["state"]
    assert newer != state
    page = ask(watch, "/")[1]
    assert f'const shown = "{newer}"' in page
    assert "The run did not finish" in page
    with locked(folder):  # as the run itself keeps it
        assert json.loads(ask(watch, "/state")[1])["state"] != newer
        assert "The run is still in progress" in ask(watch, "/")[1]
    assert "The run did not finish" in ask(watch, "/")[1]
    with open(folder / "metrics.jsonl", "a") as rows:
        rows.write('{"kind": "train", "step"')  # a row that is just being written
    assert json.loads(ask(watch, "/state")[1])["state"] != newer
    assert "sony" in ask(watch, "/")[1]


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/runs", "/run.json", "/?a", "/state/", "/secret.txt"],
)
def test_no_address_leads_to_a_file(watch: Watch, path: str) -> None:
    status, text = ask(watch, path)
    assert status == 404
    assert "nobody's business" not in text


def test_only_this_machine_is_answered(watch: Watch) -> None:
    assert watch.server_address[0] == "127.0.0.1"
    assert ask(watch, "/", host="evil.example:80")[0] == 403
    assert ask(watch, "/state", host=f"localhost:{watch.server_port}")[0] == 200


def test_ctrl_c_ends_it_in_peace(
    bigstep: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Watch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "serve_forever", interrupted)
    status, out, err = bigstep("report", str(tmp_path), "--watch")
    assert (status, err) == (0, "")
    assert out.startswith("http://127.0.0.1:")
    assert out.endswith("Stopped; the runs continue.\n")
    status, _, err = bigstep("report", str(tmp_path), "--watch", "--markdown")
    assert status == 2
    assert "leave out --html" in err
    status, _, err = bigstep("report", str(tmp_path), "--watch", "--port", "70000")
    assert status == 2
    assert "--port 70000 cannot be used" in err


def test_a_browser_that_leaves_before_it_has_all_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with Watch([Path("runs")]) as watch:
        for error, told in ((ConnectionResetError(), False), (ZeroDivisionError(), True)):
            try:
                raise error
            except Exception:
                watch.handle_error(None, ("127.0.0.1", 1))
            assert ("ZeroDivisionError" in capsys.readouterr().err) == told

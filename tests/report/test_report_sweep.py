"""Many runs on one page, in a real Chromium: grouped, coloured, split, filtered, compared and
saved.
"""

import shutil
import threading

import fake
import pytest
from test_report_browser import ask, find, open_soon, settle

from kairosfl.report.page import write_report
from kairosfl.report.read import read_groups
from kairosfl.report.sweep import crossed, parameters, rule_options
from kairosfl.report.watch import serve

RATES, MUS = (0.01, 0.1, 1.0), (0.001, 0.1, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nine groups of FedProx and three of FedAvg, two seeds each; one of them diverged with both."""
    out = tmp_path_factory.mktemp("grid")
    for lr in RATES:
        for mu in (None, *MUS):
            for seed in (0, 1):
                name = f"fedprox(mu={mu})" if mu else "fedavg"
                top = 0.6 - abs(lr - 0.1) * 0.2 - (mu or 0) * 0.1
                run = fake.write_run(
                    out / f"{lr}-{mu}-{seed}", algorithm=name, lr=lr, seed=seed, top=top, rounds=10
                )
                if (lr, mu) == (1.0, 1.0):
                    fake.edit(run, loss=[1.0] * 5 + [1e7] * 5)
    return out


@pytest.fixture(scope="module")
def report(folder):
    return write_report([folder], folder / "report.html")


@pytest.fixture
def opened(browser, report):
    browser.set_window_size(1280, 900)
    browser.get(report.as_uri())
    settle(browser)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def choose(browser, name, value):
    script = "const s = byId(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event(arguments[2]))"
    browser.execute_script(script, name, value, "input" if name == "filter" else "change")
    settle(browser)


def test_the_parameters_are_the_settings_and_options_in_which_groups_differ(folder):
    varied = parameters(read_groups([folder]))
    assert {name: len(set(values)) for name, values in varied.items()} == {
        "algorithm": 2,
        "fedprox.mu": 4,
        "lr": 3,
    }
    assert crossed(varied) == ("lr", "fedprox.mu")
    assert rule_options("fedprox(mu=0.1) + my.rules.Mine(a='b') + alt") == (
        "fedprox + my.rules.Mine + alt",
        {"fedprox.mu": "0.1", "my.rules.Mine.a": "b"},
    )
    assert rule_options("what is this") == ("what is this", {})
    assert crossed({"a": ["1", "2", "3", "4"], "b": ["1", "2", "3", "4"]}) is None


def test_many_groups_are_coloured_and_split_by_parameters(opened):
    assert ask(opened, "[page.colour, page.facet]") == ["fedprox.mu", "lr"]
    titles = "[...document.querySelectorAll('#result .facet b')].map(b => b.textContent)"
    assert ask(opened, titles) == [f"Test accuracy, lr = {lr}" for lr in RATES]
    lines = "[...document.querySelectorAll('#result .facet')].map(f => f.querySelectorAll('.line').length)"
    assert ask(opened, lines) == [4, 4, 4]
    axes = (
        "new Set(page.charts.filter(c => c.spec.key.startsWith('accuracy-0')).map(c => c.y(0.3)))"
    )
    assert ask(opened, f"{axes}.size") == 1
    colours = "new Set([...document.querySelectorAll('#result .line')].map(l => getComputedStyle(l).stroke))"
    assert ask(opened, f"{colours}.size") == 4
    chips = "[...document.querySelectorAll('.chip')].filter(c => c.offsetParent).map(c => c.textContent)"
    assert ask(opened, chips) == [f"fedprox.mu {mu}" for mu in ("–", "0.001", "0.1", "1.0")]
    find(opened, ".chip[data-level='0.1']").click()
    settle(opened)
    assert ask(opened, lines) == [3, 3, 3]
    assert ask(opened, "document.querySelectorAll('#result .dim').length") == 0
    choose(opened, "facet", "")
    assert ask(opened, "document.querySelectorAll('.facet').length") == 0
    choose(opened, "colour", "")
    assert ask(opened, f"{chips}.length") == 12
    assert ask(opened, "document.querySelectorAll('#fig-accuracy .line').length") == 9


def test_the_filter_leaves_out_groups_everywhere(opened):
    shown = "[...document.querySelectorAll('#results tbody tr')].filter(r => !r.hidden).length"
    for words, count in (
        ("fedprox", 9),
        ("lr=0.1", 4),
        ("lr>0.05 mu<=0.1", 4),
        ("nothing", 0),
        ("", 12),
    ):
        choose(opened, "filter", words)
        assert ask(opened, shown) == count, words
        assert ask(opened, "document.querySelectorAll('#result .facet .line').length") == count
    choose(opened, "filter", "lr=0.1")
    assert find(opened, "#found").text == "4 of 12 groups"
    assert ask(opened, "document.querySelectorAll('#fig-grid .value text').length") == 4


def test_a_sweep_that_grows_on_a_live_page_is_coloured_once_there_are_many(
    browser, folder, tmp_path
):
    from selenium.webdriver.support.ui import WebDriverWait

    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    with serve(tmp_path, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        for some, colour in ((runs[:8], ""), (runs[8:], "fedprox.mu")):
            for run in some:
                shutil.copytree(run, tmp_path / run.name)
            wanted = len(list(tmp_path.iterdir())) // 2
            WebDriverWait(browser, 20).until(
                lambda b, wanted=wanted: ask(b, "page.groups?.length") == wanted
            )
            settle(browser)
            assert ask(browser, "page.colour") == colour
            assert not find(browser, "#results th[data-name='cohort']").is_displayed()
        server.shutdown()
    browser.get("about:blank")
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_columns_can_be_chosen_and_parameters_sort_as_numbers(opened):
    heads = "[...document.querySelectorAll('#results th')].filter(h => h.offsetParent).map(h => h.textContent)"
    assert not {"lr", "cohort"} & set(ask(opened, heads))
    opened.execute_script("byId('choose').open = true")
    for box in opened.find_elements("css selector", "#choose label"):
        if box.text in ("lr", "cohort", "MB"):
            box.click()
    assert {"lr", "cohort"} < set(ask(opened, heads))
    assert "MB" not in ask(opened, heads)
    find(opened, "#results th[data-name='=lr'] button").click()
    order = ask(
        opened,
        "[...document.querySelectorAll('#results [data-column=\"=lr\"]')].map(c => c.textContent)",
    )
    assert order == sorted(order, key=float, reverse=True)


def test_another_baseline_moves_the_differences_and_the_target(opened):
    cell = 'document.querySelector(\'#results tr[data-group="{}"] [data-column="vs. baseline"]\').textContent'
    first = ask(opened, "page.data.baselines[0]")
    assert ask(opened, cell.format(first)) == "baseline"
    labels = ask(opened, "page.groups.map(g => g.label)")
    assert labels[first] == "fedavg · lr=0.1"
    assert "what fedavg · lr=0.1, the baseline, reaches" in find(opened, "#goal-words").text
    other = labels.index("fedprox(mu=0.001) · lr=1.0")
    choose(opened, "baseline", str(other))
    assert ask(opened, cell.format(other)) == "baseline"
    assert ask(opened, cell.format(first)).startswith("+")
    assert " to " in ask(opened, cell.format(first))
    assert ask(opened, "page.target") == pytest.approx(ask(opened, f"page.groups[{other}].goal"))
    assert labels[other] in find(opened, "#goal-words").text
    alike = "[...document.querySelectorAll('#results small')].filter(s => s.textContent === 'the same in all seeds')"
    assert (
        ask(opened, f"document.querySelectorAll('#results .range').length + {alike}.length") == 10
    )


def test_a_group_that_diverged_is_marked_and_not_compared(opened):
    labels = ask(opened, "page.groups.map(g => g.label)")
    lost = labels.index("fedprox(mu=1.0) · lr=1.0")
    row = find(opened, f"#results tr[data-group='{lost}']")
    assert "2 diverged" in row.text
    assert (
        find(opened, f"#results tr[data-group='{lost}'] [data-column='vs. baseline']").text == "–"
    )
    assert str(lost) not in ask(opened, "Object.keys(page.data.versus)")
    assert ask(opened, f"page.groups[{lost}].final") is None
    opened.execute_script("byId('every').open = true")
    assert find(opened, f"#runs tr[data-group='{lost}'] .flag").text == "diverged in round 6"
    assert "Not compared: 1 diverged." in find(opened, ".verdict").text


def test_two_parameters_make_a_heat_map(opened):
    assert ask(opened, "[byId('grid-across').value, byId('grid-up').value]") == ["lr", "fedprox.mu"]
    shown = "document.querySelectorAll('#fig-grid .value text').length"
    assert ask(opened, shown) == 11  # the one that diverged is blank
    choose(opened, "grid-up", "algorithm")
    assert ask(opened, shown) == 6


def test_every_chart_is_saved_as_svg_png_and_csv(opened):
    names = "[...t.children].map(b => b.textContent).filter(b => b === b.toUpperCase()).join(' ')"
    kinds = f"[...new Set([...document.querySelectorAll('figure .tools')].map(t => {names}))]"
    assert ask(opened, kinds) == ["SVG PNG CSV"]
    png = opened.execute_async_script("page.charts[0].save('png').then(arguments[0])")
    assert png.startswith("data:image/png;base64,")
    assert len(png) > 10_000
    head, first, *rest = ask(opened, "page.charts[0].save('csv')").splitlines()
    assert head == "round,group,curve,mean,deviation,seeds"
    assert first.startswith("1,")
    assert len(rest) == 4 * 10 - 1
    head, *cells = ask(opened, "page.charts.at(-1).save('csv')").splitlines()
    assert head == "fedprox.mu,lr,%"
    assert len(cells) == 11
    head, *rows = ask(opened, "saveTable('results')").splitlines()
    assert head.startswith("algorithm,seeds,rounds,final 10 %,vs. baseline")
    assert len(rows) == 12


@pytest.mark.slow
def test_a_hundred_runs_of_500_rounds_are_small_and_soon_there(browser, tmp_path):

    for number in range(20):
        lr, name = RATES[number % 3], f"fedprox(mu=0.{number // 3 + 1})" if number > 2 else "fedavg"
        for seed in range(5):
            folder = tmp_path / f"{number}-{seed}"
            fake.write_run(folder, algorithm=name, lr=lr, seed=seed, rounds=500, clients=100)
    open_soon(browser, write_report([tmp_path], tmp_path / "report.html"), 20)
    assert ask(browser, "[page.groups.length, page.data.runs.length]") == [20, 100]
    assert ask(browser, "page.data.lines[0].series[0].x.length") == 500
    assert browser.get_log("browser") == []


def test_four_facets_are_two_rows_of_two(opened):
    choose(opened, "colour", "lr")
    choose(opened, "facet", "fedprox.mu")
    tops = ask(
        opened,
        "[...document.querySelectorAll('#result .facet')].map(f => f.getBoundingClientRect().top)",
    )
    assert [tops.count(top) for top in sorted(set(tops))] == [2, 2]
    choose(opened, "colour", "fedprox.mu")
    choose(opened, "facet", "lr")
    tops = ask(
        opened,
        "[...document.querySelectorAll('#result .facet')].map(f => f.getBoundingClientRect().top)",
    )
    assert len(set(tops)) == 1


def test_the_heat_map_names_both_axes_also_as_a_file(opened):
    assert (
        ask(opened, "page.charts.find(c => c.spec.key === 'grid').picture().text").count(
            "↑ fedprox.mu<"
        )
        == 1
    )


def test_on_paper_only_a_short_table_is_kept_together(opened):
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert (
            ask(
                opened,
                "getComputedStyle(document.querySelector('.together:has(#results)')).breakInside",
            )
            == "avoid"
        )
        opened.execute_script(
            "const b = document.querySelector('#results tbody'); b.append(b.rows[0].cloneNode(true))"
        )
        assert (
            ask(
                opened,
                "getComputedStyle(document.querySelector('.together:has(#results)')).breakInside",
            )
            == "auto"
        )
    finally:
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})

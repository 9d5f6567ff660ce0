"""The page in a real Chromium: everything is drawn, nothing is fetched, and it does what a hand
tells it.
"""

import threading

import fake
import pytest

from kairosfl.report.page import write_report
from kairosfl.report.watch import serve
from kairosfl.runs import STOPPED

GROUPS = len(fake.ALGORITHMS)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = fake.write_sweep(
        tmp_path_factory.mktemp("sweep"), seeds=3, rounds=40, detector="fgn.paired()"
    )
    return write_report([folder], folder / "report.html")


@pytest.fixture
def opened(browser, report):
    browser.set_window_size(1280, 900)
    browser.get(report.as_uri())
    hand(browser).move_to_element(
        find(browser, "h1")
    ).perform()  # off the chips, where the last test may have left it
    settle(browser)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def ask(browser, script, *values):
    return browser.execute_script(f"return {script}", *values)


def open_soon(browser, report, patience):
    """Open a report of less than 8 MB, which must show something within two seconds."""
    from selenium.webdriver.support.ui import WebDriverWait

    assert report.stat().st_size < 8_000_000
    browser.get(report.as_uri())
    paint = "performance.getEntriesByName('first-contentful-paint')"
    WebDriverWait(browser, patience).until(lambda b: ask(b, f"{paint}.length"))
    assert ask(browser, f"{paint}[0].startTime") < 2000


def settle(browser):
    """Wait until what was asked for is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    WebDriverWait(browser, 20, 0.02).until(
        lambda b: ask(b, "page.waiting === undefined && page.late.length === 0")
    )


def find(browser, selector):
    return browser.find_element("css selector", selector)


def hand(browser):
    from selenium.webdriver.common.action_chains import ActionChains

    return ActionChains(browser, duration=0)


def drag(browser, selector, start, end):
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center'})", find(browser, selector)
    )
    hand(browser).move_to_element(
        find(browser, f"{selector} figcaption")
    ).perform()  # off a chip that came under it
    settle(browser)
    area = find(browser, f"{selector} .overlay")
    width = area.rect["width"]
    moves = (
        hand(browser)
        .move_to_element_with_offset(area, round((start - 0.5) * width), 0)
        .click_and_hold()
    )
    for part in (0.3, 0.6, 1.0):
        moves.move_to_element_with_offset(
            area, round((start + part * (end - start) - 0.5) * width), 0
        )
    moves.release().perform()
    settle(browser)


def test_every_chart_is_drawn_and_nothing_is_fetched(opened):
    shown = "page.charts.filter(c => !c.figure.hidden)"
    assert ask(opened, f"{shown}.length") == 12 + 2
    assert (
        ask(
            opened,
            f"{shown}.filter(c => !c.svg.querySelector('.line, image')).map(c => c.spec.key)",
        )
        == []
    )
    odd = "l.getTotalLength() < 20 || /NaN|undef/.test(l.outerHTML)"
    assert (
        ask(opened, f"[...document.querySelectorAll('.line path')].filter(l => {odd}).length") == 0
    )
    assert ask(opened, "document.querySelectorAll('#fig-accuracy .line').length") == GROUPS
    assert ask(opened, "document.querySelectorAll('#fig-accuracy .band').length") == GROUPS
    assert (
        ask(opened, "document.querySelectorAll('#fig-accuracy .strip line').length") == 2 * GROUPS
    )
    assert (
        ask(
            opened,
            "performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length",
        )
        == 0
    )


def test_a_chip_hides_a_run_everywhere_and_two_clicks_leave_it_alone(opened):
    find(opened, ".chip[data-group='1']").click()
    settle(opened)
    assert ask(opened, "document.querySelectorAll('.series.g1').length") == 0
    assert ask(opened, "document.querySelectorAll('#fig-accuracy .line').length") == GROUPS - 1
    assert "off" in find(opened, "tr[data-group='1']").get_attribute("class")
    find(opened, ".chip[data-group='1']").click()
    settle(opened)
    assert ask(opened, "document.querySelectorAll('#fig-accuracy .line').length") == GROUPS
    hand(opened).double_click(find(opened, ".chip[data-group='2']")).perform()
    settle(opened)
    assert ask(
        opened, "[...document.querySelectorAll('#fig-accuracy .series')].map(s => s.matches('.g2'))"
    ) == [True]
    assert ask(opened, "document.querySelectorAll('#fig-accuracy .critical rect').length") == 2


def test_hiding_a_run_under_the_pointer_does_not_fade_the_others(opened):
    chip = find(opened, ".chip[data-group='1']")
    hand(opened).move_to_element(chip).perform()
    settle(opened)
    assert (
        ask(opened, "document.querySelectorAll('#fig-accuracy .series.dim').length") == GROUPS - 1
    )
    chip.click()
    settle(opened)
    assert ask(opened, "document.querySelectorAll('.dim').length") == 0
    chip.click()
    settle(opened)
    assert (
        ask(opened, "document.querySelectorAll('#fig-accuracy .series.dim').length") == GROUPS - 1
    )


def shading(browser, key):
    return ask(browser, f"document.querySelector('#fig-{key} .shading').textContent")


def test_shading_is_explained_where_it_is_drawn_and_only_there(opened):
    bands, strips = (
        "Bands: ± standard deviation over seeds.",
        "Strips below: critical learning periods.",
    )
    assert shading(opened, "accuracy") == f"{bands} {strips}"
    assert shading(opened, "accuracy-bytes") == bands
    assert ">" + f"{bands} {strips}" + "<" in ask(opened, "page.charts[0].save()")
    hand(opened).double_click(find(opened, ".chip[data-group='2']")).perform()
    settle(opened)
    assert shading(opened, "accuracy") == f"{bands} Shaded: critical learning periods."
    opened.execute_script(
        "const s = document.getElementById('spread'); s.value = 'mean'; s.dispatchEvent(new Event('change'))"
    )
    settle(opened)
    assert shading(opened, "accuracy") == "Shaded: critical learning periods."
    assert shading(opened, "accuracy-bytes") == ""
    assert not find(opened, "#fig-accuracy-bytes .shading").is_displayed()


def test_one_run_without_critical_periods_has_nothing_shaded_and_says_nothing(browser, tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=10)
    fake.edit(run, critical=False)
    browser.get(write_report([run], tmp_path / "report.html").as_uri())
    assert ask(browser, "document.querySelectorAll('.band, .critical, .strip').length") == 0
    assert (
        ask(browser, "[...document.querySelectorAll('.shading')].map(e => e.textContent).join('')")
        == ""
    )


def test_dragging_zooms_all_charts_over_rounds_and_a_double_click_goes_back(opened):
    drag(opened, "#fig-accuracy", 0.25, 0.5)
    low, high = ask(opened, "page.range")
    assert low == pytest.approx(1 + 39 * 0.25, abs=0.5)
    assert high == pytest.approx(1 + 39 * 0.5, abs=0.5)
    assert ask(opened, "page.charts.find(c => c.spec.key === 'fgn').range") == [low, high]
    assert ask(opened, "page.charts.find(c => c.spec.key === 'accuracy-bytes').own") is None
    assert find(opened, "#fig-accuracy .tools button").is_displayed()
    for _ in range(3):  # on a busy machine, the two clicks may be too far apart
        hand(opened).double_click(find(opened, "#fig-accuracy .overlay")).perform()
        settle(opened)
        if ask(opened, "page.range") is None:
            break
    assert ask(opened, "page.range") is None
    drag(opened, "#fig-accuracy-bytes", 0.5, 0.1)
    low, high = ask(opened, "page.charts.find(c => c.spec.key === 'accuracy-bytes').own")
    assert 0 < low < high
    assert ask(opened, "page.range") is None


def test_the_wheel_zooms_with_control_only_and_keys_do_too(opened):
    wheel = """document.querySelector('#fig-accuracy .overlay').dispatchEvent(new WheelEvent('wheel',
        {deltaY: -100, ctrlKey: arguments[0], clientX: 600, cancelable: true, bubbles: true}))"""
    opened.execute_script(wheel, False)
    assert ask(opened, "page.range") is None
    opened.execute_script(wheel, True)
    low, high = ask(opened, "page.range")
    assert 1 < low < high < 40
    settle(opened)  # the zoom draws the chart anew, and with it the element
    svg = find(opened, "#fig-accuracy svg")
    opened.execute_script("arguments[0].focus()", svg)
    svg.send_keys("0")
    settle(opened)
    assert ask(opened, "page.range") is None


def test_two_fingers_zoom_and_one_does_not(opened):
    opened.execute_cdp_cmd(
        "Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2}
    )
    try:
        opened.refresh()
        settle(opened)
        opened.execute_script(
            "document.querySelector('#fig-accuracy').scrollIntoView({block: 'center'})"
        )
        box = ask(
            opened,
            "document.querySelector('#fig-accuracy .overlay').getBoundingClientRect().toJSON()",
        )
        x, y = box["left"] + box["width"] / 2, box["top"] + box["height"] / 2

        def touch(kind, *offsets):
            points = [{"x": x + offset, "y": y, "id": i} for i, offset in enumerate(offsets)]
            opened.execute_cdp_cmd(
                "Input.dispatchTouchEvent", {"type": kind, "touchPoints": points}
            )
            settle(opened)

        touch("touchStart", -50)
        touch("touchMove", -100)
        touch("touchEnd")
        assert ask(opened, "page.range") is None
        touch("touchStart", -100, 100)
        touch("touchMove", -150, 150)  # draws the chart anew; the fingers are still on the old one
        assert ask(opened, "page.range") == pytest.approx([1 + 39 / 6, 40 - 39 / 6], abs=0.5)
        touch("touchMove", -200, 200)
        low, high = ask(opened, "page.range")
        assert [low, high] == pytest.approx([1 + 39 / 4, 40 - 39 / 4], abs=0.5)
        touch("touchEnd")
        assert ask(opened, "page.range") == [low, high]
        assert ask(opened, "document.querySelectorAll('#fig-accuracy .plot > svg').length") == 1
    finally:
        opened.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_hovering_shows_the_numbers_and_a_line_in_the_other_charts(opened):
    area = find(opened, "#fig-accuracy .overlay")
    hand(opened).move_to_element(area).perform()
    tip = find(opened, "#tip")
    assert tip.text.startswith("round 2")
    assert all(algorithm in tip.text for algorithm in fake.ALGORITHMS)
    assert tip.text.count("±") == GROUPS
    assert ask(opened, "document.querySelectorAll('#fig-fgn .cross line').length") == 1
    hand(opened).move_to_element(find(opened, "h1")).perform()
    assert not tip.is_displayed()


def test_hovering_says_nothing_of_a_run_that_is_over(browser, tmp_path):
    for name, rounds, every in (("fedavg", 1, 1), ("fedprox", 20, 1), ("alt", 20, 2)):
        fake.write_run(tmp_path / name, algorithm=name, rounds=rounds, planned=20, eval_every=every)
    browser.get(write_report([tmp_path], tmp_path / "report.html").as_uri())
    shown = """const chart = page.charts[0]; chart.pointAt(arguments[0]);
        return [document.querySelector('#tip b').textContent,
                [...document.querySelectorAll('#tip .row')].map(row => row.textContent)]"""
    heading, rows = browser.execute_script(shown, 17)
    assert heading == "round 17"
    assert [row[1:4] for row in sorted(rows, key=lambda row: "fedprox" in row)] == ["alt", "fed"]
    assert "round 16" in next(row for row in rows if "alt" in row)  # where it was last evaluated
    heading, rows = browser.execute_script(shown, 1)
    assert heading == "round 1"
    assert len(rows) == 2


def test_seeds_that_are_alike_but_for_rounding_do_not_stop_the_drawing(browser, tmp_path):
    for seed in range(3):
        for lr in (0.1, 0.05):
            fake.write_run(tmp_path / f"{seed}{lr}", seed=seed, lr=lr, rounds=4)
    browser.get(write_report([tmp_path], tmp_path / "report.html").as_uri())
    for chip in browser.find_elements("css selector", ".chip"):
        chip.click()
        settle(browser)
        chip.click()
    assert (
        ask(browser, "page.charts.find((c) => c.spec.key === 'lr').spec.series[0].deviation[0]")
        == 0
    )
    assert browser.get_log("browser") == []


def test_the_target_moves_the_table(opened):
    cell = "tr[data-group='0'] [data-column='rounds to target']"
    before = find(opened, cell).text
    for target, check in (("99", lambda text: text == "–"), ("1", lambda text: text == "1")):
        opened.execute_script(
            "const t = document.getElementById('target'); t.value = arguments[0]; t.dispatchEvent(new Event('input'))",
            target,
        )
        assert check(find(opened, cell).text), (target, before)
    assert find(opened, "#goal-words").text == "as typed here"
    said = "what fedavg, the baseline, reaches in the final 10 % of its rounds, rounded"
    opened.execute_script(
        "byId('target').value = ''; byId('target').dispatchEvent(new Event('input'))"
    )
    assert [find(opened, "#goal-words").text, find(opened, cell).text] == [said, before]
    opened.execute_script(
        "byId('smooth').dispatchEvent(new Event('change'))"
    )  # which fills the field again
    assert [find(opened, "#goal-words").text, find(opened, cell).text] == [said, before]


def test_the_page_counts_the_target_as_the_table_of_python_does(opened):
    shown = "[...document.querySelectorAll('[data-column$=\"to target\"]')].map(c => c.textContent)"
    made = "[...document.querySelectorAll('[data-column$=\"to target\"]')].map(c => c.title)"
    assert ask(opened, shown) == ask(opened, made)


def test_looking_into_another_run_shows_its_heat_maps(opened):
    from selenium.webdriver.support.ui import Select

    assert not find(opened, "#fig-lambda-2").is_displayed()
    Select(find(opened, "#inside-select")).select_by_value("2")
    settle(opened)
    assert find(opened, "#fig-lambda-2 image").is_displayed()
    assert not find(opened, "#fig-weights-0").is_displayed()
    hand(opened).move_to_element(find(opened, "#fig-lambda-2 .overlay")).perform()
    assert find(opened, "#tip").text.startswith("client ")


def test_columns_sort_axes_turn_logarithmic_curves_smooth_and_seeds_spread(opened):
    find(opened, "[title^='Mean accuracy'] button").click()
    first = ask(opened, "document.querySelector('.sortable tbody tr').dataset.group")
    assert first == "2"
    before = ask(opened, "document.querySelector('#fig-fgn .line path').getAttribute('d')")
    opened.execute_script("page.charts.find(c => c.spec.key === 'fgn').logButton.click()")
    assert ask(opened, "document.querySelector('#fig-fgn .line path').getAttribute('d')") != before
    for control, value, mark in (("smooth", "11", ".raw"), ("spread", "seeds", ".seed")):
        opened.execute_script(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change'))",
            control,
            value,
        )
        settle(opened)
        assert ask(opened, f"document.querySelectorAll('#fig-accuracy {mark}').length") > 0


def test_light_and_dark(opened):
    paper = "getComputedStyle(document.body).backgroundColor"
    colours = {ask(opened, paper)}
    find(opened, "#theme").click()
    colours.add(ask(opened, paper))
    assert colours == {"rgb(255, 255, 255)", "rgb(20, 22, 26)"}


def test_a_saved_picture_stands_by_itself(opened):
    text = ask(opened, "page.charts[0].save()")
    check = "new DOMParser().parseFromString(arguments[0], 'image/svg+xml').querySelector('parsererror') === null"
    assert ask(opened, check, text)
    assert "var(--" not in text
    assert "stroke:rgb(0, 114, 178)" in text.replace("stroke: ", "stroke:")
    assert all(
        f">{letter}  {algorithm}<" in text
        for letter, algorithm in zip("ABC", fake.ALGORITHMS, strict=False)
    )
    assert ">Test accuracy<" in text
    left, right, first, last = ask(
        opened,
        """(() => { const svg = new DOMParser().parseFromString(arguments[0], 'image/svg+xml').documentElement;
        document.body.append(svg); const box = svg.viewBox.baseVal, all = svg.getBBox(); svg.remove();
        return [box.x, box.x + box.width, all.x, all.x + all.width]; })()""",
        text,
    )
    assert left <= first < last <= right + 1  # title and legend lie inside the picture
    names = ask(opened, "page.charts.find((chart) => chart.spec.key === 'client-accuracy').save()")
    assert ", worst tenth<" in names
    heat = ask(
        opened, "page.charts.find((chart) => chart.spec.power && !chart.figure.hidden).save()"
    )
    assert f": {next(iter(fake.ALGORITHMS))}<" in heat


def test_it_fits_a_phone(opened):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    opened.refresh()
    assert ask(opened, "[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    assert (
        ask(opened, "document.querySelector('#fig-fgn svg').getBoundingClientRect().right") <= 390
    )
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints(opened):
    pdf = opened.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(pdf) > 20_000
    assert not ask(opened, "page.printing")


def test_one_run_alone_is_shaded_over_the_whole_height(browser, tmp_path):
    run = fake.write_run(tmp_path / "a", algorithm="pa3fed", rounds=40, eval_every=5)
    browser.get(write_report([run], tmp_path / "report.html").as_uri())
    assert ask(browser, "document.querySelectorAll('#fig-accuracy .critical rect').length") == 2
    assert ask(browser, "document.querySelectorAll('.badge').length") == 0
    assert browser.get_log("browser") == []


def test_the_only_run_whose_rules_follow_the_detector_has_a_strip_among_others(browser, tmp_path):
    fake.write_run(tmp_path / "a", algorithm="fedavg")
    fake.write_run(tmp_path / "b", algorithm="fedcl")
    browser.get(write_report([tmp_path], tmp_path / "report.html").as_uri())
    assert ask(browser, "document.querySelectorAll('#fig-accuracy .critical').length") == 0
    strips = "[...document.querySelectorAll('#fig-accuracy .strip')].every((strip) => strip.matches('.g1'))"
    assert ask(
        browser, f"document.querySelectorAll('#fig-accuracy .strip line').length > 0 && {strips}"
    )
    assert shading(browser, "accuracy") == "Strips below: critical learning periods."
    assert browser.get_log("browser") == []


def test_a_name_is_text_whatever_it_looks_like(browser, tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=2)
    config = (
        (run / "config.toml")
        .read_text()
        .replace('"fedavg"', "'</script><img src=x onerror=\"window.broken=1\">'")
    )
    (run / "config.toml").write_text(config)
    browser.get(write_report([run], tmp_path / "report.html").as_uri())
    assert ask(browser, "window.broken") is None
    assert ask(browser, "page.groups[0].label").startswith("</script><img")
    assert browser.get_log("browser") == []


def test_ten_runs_of_500_rounds_are_small_and_soon_there(browser, tmp_path):

    names = {f"fedavgm(beta=0.{i}) + fedaware + alt": 0.5 + i / 100 for i in range(10)}
    folder = fake.write_sweep(tmp_path / "ten", seeds=1, algorithms=names, rounds=500, clients=100)
    open_soon(browser, write_report([folder], tmp_path / "report.html"), 10)
    assert browser.get_log("browser") == []


def test_a_live_page_takes_in_new_rounds_and_keeps_what_was_chosen(browser, tmp_path):
    from selenium.webdriver.support.ui import WebDriverWait

    with serve(tmp_path, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        assert find(browser, ".verdict").text == "Waiting for the first round."
        fake.write_sweep(tmp_path / "s", seeds=1, rounds=5, planned=9, done=False)
        WebDriverWait(browser, 20).until(lambda b: ask(b, "page.charts.length") > 5)
        find(browser, ".chip[data-group='1']").click()
        find(browser, "th[title^='Highest'] button").click()
        find(browser, "th[title^='Highest'] button").click()
        browser.execute_script(
            "page.charts.find((c) => c.spec.key === 'accuracy-bytes').zoom([10, 20])"
        )
        browser.execute_script("page.charts.find((c) => c.spec.key === 'loss').logButton.click()")
        field = find(browser, "#target")
        field.clear()
        field.send_keys("3")
        path = tmp_path / "s/0-0/metrics.jsonl"
        path.write_text(path.read_text() + '{"round": 6, "accuracy": 0.5}\n')
        WebDriverWait(browser, 20).until(lambda b: ask(b, "page.data.runs[0].round.length") == 6)
        settle(browser)
        assert find(browser, ".chip[data-group='1']").get_attribute("aria-pressed") == "false"
        assert ask(browser, "document.querySelectorAll('#fig-accuracy .line').length") == GROUPS - 1
        assert find(browser, "th[title^='Highest']").get_attribute("aria-sort") == "ascending"
        assert ask(browser, "page.charts.find((c) => c.spec.key === 'accuracy-bytes').own") == [
            10,
            20,
        ]
        assert find(browser, "#fig-loss .tools button[aria-pressed='true']").text == "log"
        assert ask(browser, "[document.activeElement.id, document.activeElement.value]") == [
            "target",
            "3",
        ]
        assert "0 of 4 runs finished, 21 of 36 rounds" in find(browser, "#live").get_attribute(
            "textContent"
        )
        server.shutdown()
    browser.get("about:blank")
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_a_letter_is_where_its_curve_ends_unless_another_ends_there(browser, tmp_path):
    for name, rounds, top in (("fedavg", 40, 0.6), ("scaffold", 20, 0.6)):
        fake.write_run(tmp_path / "runs" / name, algorithm=name, rounds=rounds, top=top)
    browser.get(write_report([tmp_path / "runs"], tmp_path / "report.html").as_uri())
    settle(browser)
    chart = "page.charts.find(c => c.spec.key === 'accuracy-epochs')"
    script = f"""(() => {{
      const chart = {chart};
      return chart.drawn.map((s) => {{
        const circle = chart.svg.querySelector(`.badge.g${{s.group}} circle`);
        return Math.abs(chart.y(s.points.at(-1).mean) - circle.getAttribute("cy"));
      }});
    }})()"""
    assert max(ask(browser, script)) < 1


def test_on_a_phone_the_lines_between_rows_go_through_the_first_column(opened):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert (
            ask(opened, "getComputedStyle(document.querySelector('#results td')).position")
            == "sticky"
        )
        assert (
            ask(opened, "getComputedStyle(document.querySelector('#results td')).backgroundClip")
            == "padding-box"
        )
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_why_runs_stopped_is_a_sentence_and_not_in_capitals(browser, tmp_path):
    fake.write_run(tmp_path / "runs" / "good")
    run = fake.write_run(tmp_path / "runs" / "bad", algorithm="feddyn", done=False, planned=60)
    (run / "log.txt").write_text(f"{STOPPED}10 rounds in a row had no good report.\n")
    browser.get(write_report([tmp_path / "runs"], tmp_path / "report.html").as_uri())
    settle(browser)
    assert (
        find(browser, ".over").text
        == "KAIROS REPORT · 1 of 2 runs stopped: 10 rounds in a row had no good report."
    )
    assert [each.text for each in browser.find_elements("css selector", "small.flag")] == [
        "1 stopped"
    ]

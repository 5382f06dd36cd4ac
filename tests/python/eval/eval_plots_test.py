"""An evaluation's pictures and page, for eyes: nothing is cut, nothing hides behind something else."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from catalog import CATALOG, filled, model, policy, task
from chromium import chromium
from epikv.eval import page, plots
from epikv.eval.plan import Settings as Asked
from epikv.eval.plan import arms, document
from epikv.eval.summary import summarise
from epikv.stats import ratio

pytest.importorskip("matplotlib")

MANY = [*CATALOG, *(policy(f"made_up_policy_number_{n}") for n in range(30))]
Drawn = dict[str, Any]


def summary(budgets: tuple[str, ...], wanted: tuple[str, ...], problems: int = 12) -> Drawn:
    tasks = task("a", problems), task("b", problems, axis="reasoning")
    chosen = arms(MANY, wanted, 15, False)
    plan = document(model(), tasks, chosen, budgets, Asked())
    return summarise(plan, filled(plan, *tasks))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Drawn], Drawn]:
    """Draws; the figures, by the names of their files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def draw(of: Drawn) -> Drawn:
        figures: Drawn = {}

        def keep(figure: Any, path: Path, **_: Any) -> None:
            FigureCanvasAgg(figure).draw()
            figures[path.stem] = figure

        monkeypatch.setattr(Figure, "savefig", keep)
        plots.draw(tmp_path, of)
        return figures

    return draw


EVERY = [
    (budgets, wanted)
    for budgets in (("50%",), ("50%", "35%", "25%"))
    for wanted in (("h2o",), ("all",))
]


@pytest.mark.parametrize(("budgets", "wanted"), EVERY)
def test_title_panels_and_legend_keep_apart_and_whole(
    drawn: Callable[[Drawn], Drawn], budgets: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    for name, figure in drawn(summary(budgets, wanted)).items():
        whole = figure.bbox
        boxes = [figure._suptitle.get_window_extent()]
        boxes += [legend.get_window_extent() for legend in figure.legends]
        boxes += [panel.get_tightbbox() for panel in figure.axes]
        for box in boxes:
            assert whole.x0 <= box.x0 + 1 and box.x1 <= whole.x1 + 1, name
            assert whole.y0 <= box.y0 + 1 and box.y1 <= whole.y1 + 1, name
        for one, other in itertools.combinations(boxes, 2):
            overlap = (
                min(one.x1, other.x1) - max(one.x0, other.x0),
                min(one.y1, other.y1) - max(one.y0, other.y0),
            )
            assert min(overlap) <= 1, name


def test_one_budget_is_dots_in_order_each_with_its_name_and_interval(
    drawn: Callable[[Drawn], Drawn],
) -> None:
    found = summary(("50%",), ("all",))
    solved = {row["arm"]: row["solved"]["value"] for row in found["rows"] if row["task"] == "a"}
    panel = drawn(found)["accuracy"].axes[0]
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert sorted(names) == sorted(solved) and len(names) > 30
    assert [solved[name] for name in names] == sorted(solved.values())
    assert len(panel.containers) == len(names), "an interval each"


def test_lengths_begin_at_zero_and_have_intervals(drawn: Callable[[Drawn], Drawn]) -> None:
    found = summary(("50%", "25%"), ("h2o",))
    for panel in drawn(found)["length"].axes:
        assert panel.get_ylim()[0] == 0
        assert len(panel.collections) == 3, "of the two kinds of random, and of h2o"
    (one,) = (r for r in found["rows"] if (r["task"], r["budget"], r["arm"]) == ("a", "50%", "h2o"))
    assert one["length"]["low"] <= one["length"]["value"] <= one["length"]["high"]


def test_lines_of_one_height_are_seen_side_by_side(drawn: Callable[[Drawn], Drawn]) -> None:
    """Both kinds of random solve nothing here."""
    panel = drawn(summary(("50%", "25%"), ("h2o",)))["accuracy"].axes[0]
    lines = [line for line in panel.lines if list(line.get_ydata()) == [0, 0]]
    assert len(lines) == 2
    first, second = (list(line.get_xdata()) for line in lines)
    assert first != second and max(abs(a - b) for a, b in zip(first, second, strict=True)) < 1


def test_arms_that_are_told_apart_have_marks_of_their_own() -> None:
    found = summary(("50%", "25%"), ("all",))
    looks = [(s["color"], s["marker"]) for s in plots._styles(found).values() if "marker" in s]
    assert len(set(looks)) == len(looks) == len(plots.COLOURS)


def test_a_ratio_has_an_interval() -> None:
    assert ratio([2, 4, 6], [1, 2, 3]).low == ratio([2, 4, 6], [1, 2, 3]).high == 2
    found = ratio([1, 9] * 20, [5, 5] * 20)
    assert found.value == 1 and 0.6 < found.low < 0.9 and 1.1 < found.high < 1.4


def test_the_pages_tables_fit_into_a_window(tmp_path: Path) -> None:
    """Of 1280 pixels, with the widest figures there are; on a phone they scroll by themselves."""
    found = summary(("50%",), ("all",), problems=120)
    for row in found["rows"]:
        row["peak_bytes"], row["peak_tokens"] = 123 * 2**20, 12345
    file = tmp_path / "report.html"
    file.write_text(page.html(found, plots.draw(tmp_path, found)))
    wide = "[...document.querySelectorAll('.wide')].map(e => e.scrollWidth - e.clientWidth)"
    with chromium() as browser:
        browser.open(file, width=1280)
        assert browser.evaluate(wide) == [0, 0]
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
        assert browser.complaints() == []
        browser.open(file, width=400)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400

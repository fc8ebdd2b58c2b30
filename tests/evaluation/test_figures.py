import math
import re
import sys
import xml.etree.ElementTree

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from scorecal.evaluation import drawing, figures
from scorecal.evaluation.figures import Excess, LearningCurve, PositionShares, StrengthCurve

NAN = math.nan
LABELS = ["0", "1", "2"]
PROBS = [0.2, 0.5, 0.3]
SHARES = [0.25, 0.25, 0.5]
CURVE = LearningCurve([0, 10, 100], [2.0, 1.5, 1.0], [1.8, 1.2, 0.9], [2.2, 1.9, 1.1])
STRENGTH = StrengthCurve([0.1, 0.2, 0.3], [0.4, 0.6, 0.5], [0.3, 0.35, 0.2], 0.2)


def latent_bias(panels):
    return figures.latent_bias_figure(panels, LABELS, title="Latent bias")


def number_bias(panels):
    return figures.number_bias_figure(panels, LABELS, title="Number bias")


def density(panels):
    return figures.density_figure(panels, title="Density", low=0.0, high=2.0)


def bias(panels):
    return figures.bias_figure(panels, LABELS, title="Bias")


def score_share(panels):
    return figures.score_share_figure(panels, LABELS, title="Shares")


def excess(panels):
    return figures.excess_figure(panels, LABELS, title="Excess")


def strength(panels):
    return figures.strength_figure(panels, title="Strength")


def reliability(panels):
    return figures.reliability_figure(panels, title="Reliability", low=0.0, high=2.0)


def position(panels):
    return figures.position_figure(panels, title="Positions")


def learning_curve(panels):
    return figures.learning_curve_figure(panels, title="Learning curve", metric="MSE")


def history(panels):
    return figures.history_figure(panels, title="History", metric="mse", higher_is_better=False)


def front(panels):
    return figures.front_figure(panels, title="Front", metrics=("spearman", "mse"))


DATA = {
    latent_bias: {"Deb-R, 10 prompts": PROBS, "Deb-T, 100 prompts": SHARES},
    number_bias: {"Deb-R": PROBS, "Deb-T": SHARES},
    density: ([0.0, 1.0, 1.0, 2.0], [0.4, 1.0, 1.0, 1.6]),
    bias: [(0.1, -0.1, 0.3), (-0.2, -0.4, 0.0), (0.0, -0.1, 0.1)],
    score_share: {"gold": SHARES, "raw": PROBS},
    excess: Excess([0.5, -0.2, 0.1], [-0.3, 0.4, 0.1], -0.91),
    strength: {"Deb-R": STRENGTH, "Deb-T": STRENGTH},
    position: PositionShares([0.5, 0.2, 0.3], [0.4, 0.1, 0.2], [0.6, 0.3, 0.4], 0.26, 0.0005),
    reliability: {"raw": ([0.5, 1.0, 1.5], [0.8, 0.9, 1.1]), "ridge": (PROBS, SHARES)},
    learning_curve: {"raw": CURVE, "ridge": CURVE},
    history: [(2, 1.0), (0, 3.0), (1, 2.0), (3, 1.5)],
    front: ([(0.5, 2.0), (0.4, 1.0), (0.3, 3.0)], [(0.4, 1.0), (0.5, 2.0)]),
}
MISSING = {
    latent_bias: {"Deb-R, 10 prompts": [NAN, NAN, NAN], "Deb-T, 10 prompts": [0.5, NAN, 0.5]},
    number_bias: {"Deb-R": [NAN, NAN, NAN], "Deb-T": [0.5, NAN, 0.5]},
    density: ([0.0, NAN], [NAN, NAN]),
    bias: [(0.1, NAN, NAN), (NAN, NAN, NAN), (0.0, -0.1, 0.1)],
    score_share: {"gold": [NAN, NAN, NAN], "raw": [NAN, 1.0, NAN]},
    excess: Excess([NAN, NAN, NAN], [math.inf, -math.inf, NAN], NAN),
    strength: {
        "raw": StrengthCurve([0.1, 0.2], [NAN, 0.1], [NAN, NAN], 0.1),
        "Deb-T": StrengthCurve([], [], [], NAN),
    },
    position: PositionShares([0.5, 0.5, NAN], [NAN, 0.4, NAN], [NAN, math.inf, NAN], NAN, NAN),
    reliability: {"raw": ([0.5, NAN], [0.6, NAN]), "ridge": ([NAN], [NAN])},
    learning_curve: {"raw": LearningCurve([0, 10], [1.0, NAN], [NAN, NAN], [NAN, math.inf])},
    history: [(0, NAN), (1, 2.0)],
    front: ([(0.5, 2.0)], [(0.5, 2.0)]),
}
each_figure = pytest.mark.parametrize("draw", DATA, ids=lambda draw: draw.__name__)


def lines(axis):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in axis.lines}  # fmt: skip


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@each_figure
def test_a_row_wraps_after_three_panels_and_every_edge_is_described(draw):
    figure = draw({f"judge {number}": DATA[draw] for number in range(4)})
    assert [axis.get_title("left") for axis in figure.axes] == [f"judge {n}" for n in range(4)]
    tops = [round(axis.get_position().y0, 3) for axis in figure.axes]
    assert tops[0] == tops[1] == tops[2] > tops[3]
    assert all(figure.axes[index].get_ylabel() for index in (0, 3))
    assert all(figure.axes[index].get_xlabel() for index in (1, 2, 3))
    assert figure.get_suptitle()


@each_figure
def test_what_is_missing_or_infinite_leaves_a_gap(draw):
    figure = draw({"whole": DATA[draw], "with gaps": MISSING[draw]})
    figure.draw_without_rendering()
    for axis in figure.axes:
        assert all(map(math.isfinite, (*axis.get_xlim(), *axis.get_ylim())))


@each_figure
def test_nothing_lies_outside_the_axes_and_no_texts_overlap(draw):
    long = "a judge with a long name that has to be wrapped " * 2
    figure = draw({long: DATA[draw], "short": DATA[draw]})
    for axis in figure.axes:
        bottom, top = axis.get_ylim()
        left, right = axis.get_xlim()
        for line in axis.lines:
            if line.get_transform() == axis.transData:
                assert all(left <= x <= right for x in line.get_xdata())
                assert all(bottom <= y <= top for y in line.get_ydata())
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [axis.get_tightbbox(renderer) for axis in figure.axes]
    boxes += [figure.legends[0].get_window_extent(renderer)]
    boxes += [figure._suptitle.get_window_extent(renderer)]
    for index, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])


def test_positions_are_bars_with_intervals_beside_the_uniform_line():
    figure = position({"one": DATA[position], "other": DATA[position]})
    for axis in figure.axes:
        assert [bar.get_height() for bar in axis.patches] == [0.5, 0.2, 0.3]
        assert lines(axis)["uniform"][1] == [1 / 3, 1 / 3]
        ends = [list(line.get_ydata()) for line in axis.lines if "95" in line.get_label()]
        assert ends == [[0.4, 0.6], [0.1, 0.3], [0.2, 0.4]]
        assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2", "3"]
        assert [text.get_text() for text in axis.texts] == ["V = 0.260, p < 0.001"]
        assert axis.get_ylim()[0] == 0
        assert axis.get_xlabel() == "Position in the rubric"
    assert set(legend(figure)) == {"mean probability", "95 % interval", "uniform"}


def test_latent_bias_is_drawn_beside_the_uniform_line():
    figure = latent_bias({"judge": DATA[latent_bias]})
    axis = figure.axes[0]
    made = lines(axis)
    assert made["Deb-R, 10 prompts"] == ([0, 1, 2], PROBS)
    assert made["Deb-T, 100 prompts"] == ([0, 1, 2], SHARES)
    assert made["uniform"][1] == [1 / 3, 1 / 3]
    assert legend(figure) == ["Deb-R, 10 prompts", "Deb-T, 100 prompts", "uniform"]
    assert [line.get_linestyle() for line in axis.lines] == ["-", ":", "--"]
    assert len({line.get_color() for line in axis.lines}) == 3
    assert [tick.get_text() for tick in axis.get_xticklabels()] == LABELS


def test_gold_shares_are_bars_and_methods_lines():
    figure = score_share({"judge": DATA[score_share]})
    axis = figure.axes[0]
    assert [bar.get_height() for bar in axis.patches] == SHARES
    assert lines(axis) == {"raw": ([0, 1, 2], PROBS)}
    assert legend(figure) == ["gold", "raw"]


def test_number_bias_has_a_bar_of_each_source_beside_the_other_and_the_uniform_line():
    figure = number_bias({"judge": DATA[number_bias]})
    axis = figure.axes[0]
    bars = [(bar.get_x(), bar.get_height()) for bar in axis.patches]
    assert [height for _, height in bars] == [*PROBS, *SHARES]
    assert [x for x, _ in bars] == pytest.approx([-0.4, 0.6, 1.6, 0.0, 1.0, 2.0])
    assert lines(axis)["uniform"][1] == [1 / 3, 1 / 3]
    assert legend(figure) == ["Deb-R", "Deb-T", "uniform"]


def test_density_counts_items_in_cells_and_all_panels_share_the_shades():
    more = ([1.0] * 5, [1.0] * 5)
    figure = density({"judge": DATA[density], "other": more})
    cells = [axis.collections[0] for axis in figure.axes]
    counts = [sorted(mesh.get_array().compressed()) for mesh in cells]
    assert counts == [[1, 1, 2], [5]]
    assert [mesh.get_clim() for mesh in cells] == [(0, 5), (0, 5)]
    [identity] = figure.axes[0].lines
    assert (list(identity.get_xdata()), list(identity.get_ydata())) == ([0, 2], [0, 2])
    assert legend(figure) == ["predicted = gold", "5 items in a cell"]


def test_biases_are_dots_with_intervals_about_zero():
    axis = bias({"judge": DATA[bias]}).axes[0]
    zero, *others = axis.lines
    assert list(zero.get_ydata()) == [0, 0]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in others]
    assert drawn[:2] == [([0, 0], [-0.1, 0.3]), ([0], [0.1])]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == LABELS


@each_figure
def test_a_figure_in_a_page_takes_its_colours_and_needs_nothing_else(draw):
    svg = drawing.inline_svg(draw({"judge <b>": DATA[draw]}), "one")
    root = xml.etree.ElementTree.fromstring(svg)
    assert root.tag == "svg"
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert all(name.startswith("one-") for name in ids)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    assert used <= set(ids)
    assert not re.search(r"http|#000000|#444444|#ffffff|DejaVu|<image", svg)
    assert "currentColor" in svg
    assert "judge &lt;b&gt;" in svg


def test_excess_shows_both_series_and_their_correlation():
    term, over, _ = DATA[excess]
    figure = excess({"judge": DATA[excess], "undefined": MISSING[excess]})
    axis = figure.axes[0]
    assert [bar.get_height() for bar in axis.patches] == term
    assert lines(axis)["excess log(mean p / gold share)"] == ([0, 1, 2], over)
    texts = [axis.texts[0].get_text() for axis in figure.axes]
    assert texts == ["correlation −0.91", "correlation undefined"]
    assert legend(figure) == ["debiasing term B", "excess log(mean p / gold share)"]


def test_strength_is_dashed_on_dev_solid_on_test_and_marked_where_chosen():
    figure = strength({"judge": {"Deb-R": STRENGTH}})
    dev, test = figure.axes[0].lines
    assert (list(dev.get_xdata()), list(dev.get_ydata())) == (STRENGTH.strengths, STRENGTH.dev)
    assert list(test.get_ydata()) == STRENGTH.test
    assert [dev.get_linestyle(), test.get_linestyle()] == ["--", "-"]
    assert dev.get_markevery() == test.get_markevery() == [1]
    assert legend(figure) == ["Deb-R", "dev", "test", "λ chosen on dev"]
    assert figure.axes[0].get_ylabel() == "Spearman"


def test_reliability_has_equal_axes_that_hold_points_beyond_the_scale():
    figure = reliability({"judge": {"raw": ([0.5, 2.5], [0.8, 0.9])}})
    axis = figure.axes[0]
    assert lines(axis)["raw"] == ([0.5, 2.5], [0.8, 0.9])
    assert lines(axis)["predicted = gold"] == ([0, 2], [0, 2])
    assert axis.get_xlim() == axis.get_ylim() == pytest.approx((-0.1, 2.6))
    assert axis.get_aspect() == 1
    assert legend(figure) == ["predicted = gold", "raw"]


def test_learning_curves_share_evenly_spaced_numbers_of_labels():
    later = LearningCurve([10, 50], [1.0, 0.5], [0.9, 0.4], [1.1, 0.6])
    figure = learning_curve({"judge": {"raw": CURVE, "ridge": later}})
    axis = figure.axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0", "10", "50", "100"]
    assert lines(axis) == {"raw": ([0, 1, 3], CURVE.estimate), "ridge": ([1, 2], later.estimate)}
    band = axis.collections[0].get_paths()[0].vertices
    assert {(0, 1.8), (1, 1.2), (3, 1.1)} <= set(map(tuple, band))
    assert legend(figure) == ["raw", "ridge"]


def test_intervals_stand_in_the_order_given_beside_their_figures():
    rows = [("raw", 0.4, 0.3, 0.5), ("Deb-T", -0.1, NAN, NAN), ("constant", NAN, NAN, NAN)]
    figure = figures.interval_figure(rows, title="Gain", xlabel="Spearman", reference=0.0)
    axis = figure.axes[0]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["raw", "Deb-T", "constant"]
    assert axis.yaxis_inverted()
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
    assert drawn[:2] == [([0.3, 0.5], [0, 0]), ([0.4], [0])]
    assert drawn[-1][0] == [0.0, 0.0]
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["0.400 [0.300, 0.500]", "−0.100", "–"]
    assert axis.get_xlabel() == "Spearman, with 95 % interval"
    figures.interval_figure([], title="Nothing", xlabel="Spearman", reference=None)


@pytest.mark.parametrize(
    ("first", "shown"),
    [(0, ["0", "10", "20", "30", "40", "50", "60", "70", "80", "90", "100"]),
     (1, ["10", "20", "30", "40", "50", "60", "70", "80", "90", "100"])],
)  # fmt: skip
def test_a_hundred_labels_are_lines_without_markers_under_round_ticks(first, shown):
    labels = [str(label) for label in range(first, 101)]
    probs = [1 / len(labels)] * len(labels)
    panels = {"judge": {"gold": probs, "raw": probs}}
    axis = figures.score_share_figure(panels, labels, title="Shares").axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == shown
    assert [axis.lines[0].get_xdata()[int(tick)] for tick in axis.get_xticks()] == [
        int(label) - first for label in shown
    ]
    assert axis.lines[0].get_marker() == ""


def test_labels_that_are_words_are_turned_where_they_would_touch():
    labels = ["very poor", "poor", "acceptable", "good", "very good", "excellent"]
    panels = {"judge": {"raw": [1 / 6] * 6}}
    axis = figures.score_share_figure(panels, labels, title="Shares").axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == labels
    assert axis.get_xticklabels()[0].get_rotation() == 30


def test_ten_methods_look_different_and_known_ones_the_same_in_every_figure():
    names = ["raw", "Deb-T", *(f"method {number}" for number in range(8))]
    curves = dict.fromkeys(names, CURVE)
    drawn = learning_curve({"judge": curves}).axes[0].lines
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in drawn}
    assert len(looks) == 10
    alone = learning_curve({"judge": {"Deb-T": CURVE}}).axes[0].lines[0]
    assert alone.get_color() == drawn[1].get_color() != drawn[0].get_color()


def test_saving_writes_the_same_bytes_with_title_and_no_date(tmp_path):
    before = dict(matplotlib.rcParams)
    panels = {"judge $a$": DATA[score_share]}
    figure = score_share(panels)
    paths = drawing.save_figure(figure, tmp_path / "new" / "sts-0.5")
    assert [path.name for path in paths] == ["sts-0.5.png", "sts-0.5.svg"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [path.name for path in paths]
    first = [path.read_bytes() for path in paths]
    for again in (figure, score_share(panels)):
        made = drawing.save_figure(again, tmp_path / "again")
        assert [path.read_bytes() for path in made] == first
    with Image.open(paths[0]) as image:
        assert image.info["Title"] == "Shares"
        assert image.info["Description"] == "Shares. judge $a$"
    root = xml.etree.ElementTree.fromstring(first[1])
    assert root.findtext("{http://www.w3.org/2000/svg}title") == "Shares"
    assert b"judge $a$</text>" in first[1]
    assert b"<dc:date>" not in first[1]
    assert dict(matplotlib.rcParams) == before


def test_settings_of_the_user_change_no_figure():
    plain = score_share({"judge": DATA[score_share]})
    with matplotlib.rc_context({"lines.linewidth": 9, "figure.facecolor": "pink"}):
        themed = score_share({"judge": DATA[score_share]})
    assert themed.get_facecolor() == plain.get_facecolor()
    assert themed.axes[0].lines[0].get_linewidth() == plain.axes[0].lines[0].get_linewidth()


def test_a_figure_without_panels_is_refused():
    with pytest.raises(ValueError, match="at least one panel"):
        strength({})


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    figure = strength({"judge": DATA[strength]})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    message = r"figures need matplotlib. Run `pip install 'scorecal\[report\]'`\."
    with pytest.raises(ValueError, match=message):
        strength({"judge": DATA[strength]})
    with pytest.raises(ValueError, match=message):
        drawing.save_figure(figure, tmp_path / "figure")


def test_a_history_shows_the_best_so_far():
    [axis] = history({"": DATA[history]}).axes
    drawn = lines(axis)
    assert drawn["trial"] == ([0, 1, 2, 3], [3.0, 2.0, 1.0, 1.5])
    assert drawn["best so far"] == ([0, 1, 2, 3], [3.0, 2.0, 1.0, 1.0])


def test_a_front_is_drawn_in_order_with_the_chosen_trial_marked():
    [axis] = front({"": DATA[front]}).axes
    drawn = lines(axis)
    assert drawn["Pareto front"] == ([0.4, 0.5], [1.0, 2.0])
    assert drawn["chosen"] == ([0.4], [1.0])
    assert axis.get_xlabel() == "spearman, held out"


def test_importances_are_bars_by_option():
    figure = figures.importance_figure(
        {"spearman": {"strength": 0.7, "loss": 0.3}, "mse": {"strength": 1.0}},
        title="What mattered",
    )
    first, second = figure.axes
    assert [bar.get_width() for bar in first.patches] == [0.7, 0.3]
    assert [bar.get_width() for bar in second.patches] == [1.0, 0.0]
    assert [text.get_text() for text in first.get_yticklabels()] == ["strength", "loss"]

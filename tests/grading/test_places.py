"""Coordinates of each family against drawn boxes, the forms of an answer, and how well places agree, by hand.

Guards against boxes of another size than the model sees: of the file for Qwen2.5-VL, of pixels for the others.
"""

import itertools
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from data import load_processor
from grading.places import best_pairs, contains, extent_of, find_boxes, find_points, giou, iou, to_file, to_model
from inputs.images import fit_image
from tests.helpers.models import WITH_IMAGES, save_tiny

LARGEST = {"qwen2_vl": 1000, "qwen2_5_vl": 0, "qwen3_vl": 1000, "qwen3_5": 1000, "qwen3_vl_moe": 1000}
LARGEST |= {"aria": 999, "internvl": 1000, "glm4v": 1000}  # as docs/models.md says; 0: pixels
SIZES = [(333, 217), (640, 480), (97, 1013), (1921, 1079), (57, 61)]


@pytest.fixture(scope="module", params=WITH_IMAGES)
def family(request, tmp_path_factory):
    """Return a family's name and its processor, which resizes pictures to at most 300 x 300 pixels."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, load_processor(save_tiny(request.param, folder), "count", max_pixels=300 * 300)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_drawn_box_is_where_the_model_sees_it(family, size):
    """What is bright in the resized picture lies, to a pixel, where the model's coordinates say."""
    name, processor = family
    width, height = size
    box = (width // 5, height // 3, width // 5 + width // 2, height // 3 + height // 2)
    picture = Image.new("RGB", size)
    ImageDraw.Draw(picture).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill="white")
    seen = fit_image(picture, processor.preparation.fit)
    rows, columns = (np.flatnonzero((np.array(seen.convert("L")) > 127).any(axis)) for axis in (1, 0))
    bright = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    extent = extent_of(size, processor)
    assert extent == ((LARGEST[name],) * 2 if LARGEST[name] else seen.size)
    for i, x in enumerate(to_model(box, size, extent)):
        unit = extent[i % 2] / seen.size[i % 2]  # of the model's coordinates in a pixel that it sees
        assert abs(x - bright[i] * unit) <= max(unit, 0.5) + 1e-6


def test_boxes_come_back_from_the_coordinates_of_a_family(family):
    """500 random boxes and points, within half a unit of its coordinates or half a pixel."""
    _, processor = family
    rng = random.Random(0)
    for size in itertools.islice(itertools.cycle(SIZES), 500):
        extent = extent_of(size, processor)
        bound = [max(size[i] / extent[i], 1) / 2 + 1e-6 for i in (0, 1)]
        x, y = (sorted(rng.sample(range(side + 1), 2)) for side in size)
        while any(high - low < 2 * bound[i] for i, (low, high) in enumerate((x, y))):  # thinner than a unit
            x, y = (sorted(rng.sample(range(side + 1), 2)) for side in size)
        for place in ([x[0], y[0], x[1], y[1]], [rng.uniform(0, size[0]), rng.uniform(0, size[1])]):
            written = to_model(place, size, extent)
            assert all(type(x) is int and 0 <= x <= extent[i % 2] for i, x in enumerate(written))
            back = to_file(written, size, extent)
            assert all(abs(a - b) <= bound[i % 2] for i, (a, b) in enumerate(zip(place, back)))


def test_thin_boxes_and_edges():
    """A box that is thinner than a unit keeps an area, and nothing lies outside."""
    assert to_model([102, 0, 103, 4000], (4000, 4000), (1000, 1000)) == [25, 0, 26, 1000]
    assert to_model([3999.5, 10, 4000, 20], (4000, 4000), (1000, 1000)) == [999, 2, 1000, 5]
    assert to_model([-3, 5, 4003, 20], (4000, 4000), (1000, 1000)) == [0, 1, 1000, 5]
    assert to_model([4000, 2], (4000, 4000), (1000, 1000)) == [1000, 0]


def test_a_text_model_has_no_coordinates(tmp_path):
    processor = load_processor(save_tiny("qwen2_5", tmp_path), "count")
    with pytest.raises(ValueError, match="the model is text-only"):
        extent_of((10, 10), processor)


# --- what an answer says ----------------------------------------------------------------------------------------------

A, B = (1.0, 2.0, 30.0, 40.0), (5.0, 6.0, 7.5, 80.0)
BOXES = [
    ("[1, 2, 30, 40]", [A]),
    ("[[1, 2, 30, 40], [5, 6, 7.5, 80]]", [A, B]),
    ('{"bbox_2d": [1, 2, 30, 40], "label": "the 5 [5, 6, 7, 8]"}', [A]),
    ('```json\n[{"bbox_2d": [1, 2, 30, 40]}, {"bbox": [5, 6, 7.5, 80]}]\n```', [A, B]),
    ('It is {"bbox_2d": [1, 2, 30, 40], "label": "cat"}.', [A]),
    ("<|object_ref_start|>cat (1,2),(3,4)<|object_ref_end|><|box_start|>(1,2),(30,40)<|box_end|>", [A]),  # Qwen2-VL
    ("<|begin_of_box|>[[1,2,30,40]]<|end_of_box|>", [A]),  # GLM
    ("The box is <|begin_of_box|>[1,2,30,40]<|end_of_box|>.", [A]),
    ("<ref>cat 3</ref><box>[[1, 2, 30, 40], [5, 6, 7.5, 80]]</box>", [A, B]),  # InternVL
    ("(1, 2), (30, 40)", [A]),  # Aria
    ("<think>Perhaps [5, 6, 7.5, 80].</think>[1, 2, 30, 40]", [A]),
    ("[5, 6, 7.5, 80]</think><answer>[1, 2, 30, 40]</answer>", [A]),
    ("<think>[1, 2, 30, 40]", []),
    ("[x1, y1, x2, y2]", []),
    ("[1, 2, 3]", []),
    ("[1, 2, 3, 4, 5]", []),
    ("[[1, 2], [30, 40]]", []),
    ("[true, 2, 30, 40]", []),
    ("[1, 2, NaN, 40]", []),
    ("[1e999, 2, 30, 40]", [(1e6, 2.0, 30.0, 40.0)]),
    ("[" * 100_000, []),
    ("[1, 2, 30, 40] " * 1000, [A] * 200),
]
POINTS = [
    ("[12, 34]", [(12.0, 34.0)]),
    ('{"point_2d": [12, 34], "label": "at 5, 6 (5, 6)"}', [(12.0, 34.0)]),
    ("click(12, 34)", [(12.0, 34.0)]),
    ('<points x1="12" y1="34" x2="5.5" y2="6" alt="a (1, 2)">cats</points>', [(12.0, 34.0), (5.5, 6.0)]),
    ('<point x="12" y="34">', [(12.0, 34.0)]),
    ("[[12, 34], [5, 6]]", [(12.0, 34.0), (5.0, 6.0)]),
    ("(1,2),(30,40)", []),  # a box of Qwen2-VL
    ("The box [1, 2, 30, 40].", []),
    ("12, 34", []),
]


@pytest.mark.parametrize(("text", "boxes"), BOXES, ids=range(len(BOXES)))
def test_boxes_are_read_in_the_forms_of_the_families(text, boxes):
    assert find_boxes(text) == boxes


@pytest.mark.parametrize(("text", "points"), POINTS, ids=range(len(POINTS)))
def test_points_are_read(text, points):
    assert find_points(text) == points


# --- how well places agree --------------------------------------------------------------------------------------------


def test_overlap_by_hand():
    square = (0, 0, 10, 10)
    assert iou(square, square) == giou(square, square) == 1
    assert iou(square, (5, 0, 15, 10)) == pytest.approx(50 / 150) == giou(square, (5, 0, 15, 10))
    assert iou(square, (20, 0, 30, 10)) == 0 and giou(square, (20, 0, 30, 10)) == pytest.approx(-100 / 300)
    assert iou(square, (10, 0, 0, 10)) == 0 and giou(square, (10, 0, 0, 10)) == -1
    assert iou(square, (5, 5, 15, 15)) == pytest.approx(25 / 175)
    assert giou(square, (5, 5, 15, 15)) == pytest.approx(25 / 175 - 50 / 225)
    assert contains(square, (10, 0)) and not contains(square, (10.1, 0))


def test_overlap_is_the_same_in_every_unit():
    rng = random.Random(1)
    for _ in range(100):
        a, b = ([rng.uniform(0, 50), rng.uniform(0, 50), rng.uniform(50, 99), rng.uniform(50, 99)] for _ in "ab")
        in_unit = [to_file(box, (7, 1000), (100, 100)) for box in (a, b)]
        assert iou(a, b) == pytest.approx(iou(*in_unit)) and giou(a, b) == pytest.approx(giou(*in_unit))


def test_the_best_pairs_are_those_of_trying_all():
    rng = random.Random(2)
    for rows, columns in itertools.product(range(6), repeat=2):
        for _ in range(20):
            scores = [[rng.choice([0, rng.random()]) for _ in range(columns)] for _ in range(rows)]
            pairs = best_pairs(scores)
            assert len(pairs) == len({i for i, _ in pairs}) == len({j for _, j in pairs}) == min(rows, columns)
            turned = scores if rows <= columns else list(zip(*scores))
            tries = itertools.permutations(range(max(rows, columns)), min(rows, columns))
            best = max(sum(turned[i][j] for i, j in enumerate(each)) for each in tries) if turned else 0
            assert sum(scores[i][j] for i, j in pairs) == pytest.approx(best)

"""Rewards for boxes and points: --plugin examples/places.py --task box, boxes or point (docs/rewards.md).

    python grpo.py --plugin examples/places.py --task box --data train.jsonl
    python grpo.py --task vqa --reward vqa=0 --reward examples/places.py:box_giou --data train.jsonl

Rows have columns such as `bbox` or `boxes`, and `coordinates` (docs/data.md). Their places come in the coordinates that
the model writes, so that an answer is compared as it stands; IoU does not depend on the unit of an axis.
`grading.places` reads answers: JSON, the families' own forms, and `<points>`, after the thinking.
"""

import rewards
from grading.places import best_pairs, contains, find_boxes, find_only_point, giou, gold_places, iou

HIT = 0.5  # the IoU from which on a box counts as found (Acc@0.5 of RefCOCO)


def box(completion, answer, **fields):
    """Score the IoU of the only box in the answer with the row's box; range 0 to 1.

    Example: [0, 0, 10, 10] scores 0.5 if the row has [0, 0, 20, 10]. Guards against several boxes, one of them right
    (0); boxes in the thinking; edges on the wrong side (0). The whole picture scores what the object covers of it; use
    `box_hit` where objects are large.
    """
    found, gold = find_boxes(completion), only(fields)
    return iou(found[0], gold) if len(found) == 1 else 0.0


def box_hit(completion, answer, **fields):
    """Score 1 if the IoU of `box` is at least HIT, else 0.

    The whole picture scores 0 unless the object covers half of it.
    """
    return float(box(completion, answer, **fields) >= HIT)


def box_giou(completion, answer, **fields):
    """Score the generalised IoU of the only box with the row's box; range −1 to 1; −1 without exactly one box.

    It tells a near miss from a far one, where the IoU is 0 for both: for a model that seldom hits. Exploit: the whole
    picture scores above 0, more than any miss. Change to `box` once the boxes overlap.
    """
    found, gold = find_boxes(completion), only(fields)
    return giou(found[0], gold) if len(found) == 1 else -1.0


def boxes(completion, answer, **fields):
    """Score the boxes of the answer against all of the row: twice the sum of the IoU of pairs over the number of boxes.

    Range 0 to 1. The pairs are those with the largest sum; each box is in one at most. Example: one of two boxes, found
    exactly, scores 2 · 1 / (1 + 2). No box for a row without any scores 1. Guards against hundreds of boxes (0 if there
    are more than 10 and more than twice as many as the row has) and against the same box several times.
    """
    found, gold = find_boxes(completion), gold_places(fields, 4)
    if not found and not gold:
        return 1.0
    if not (found and gold) or len(found) > max(10, 2 * len(gold)):
        return 0.0
    scores = [[iou(a, b) for b in gold] for a in found]
    return 2 * sum(scores[i][j] for i, j in best_pairs(scores)) / (len(found) + len(gold))


def point(completion, answer, **fields):
    """Score 1 if the only point in the answer is in one of the row's boxes or on its edge, else 0.

    A box counts as its centre, so that the whole picture is no more than a guess at its centre. Guards against several
    points (0).
    """
    found, boxes_of_row = find_only_point(completion), gold_places(fields, 4)
    return float(found is not None and any(contains(gold, found) for gold in boxes_of_row))


def only(fields):
    """Return the only box of a row. Raises ValueError if it has none or several."""
    gold = gold_places(fields, 4)
    if len(gold) != 1:
        raise ValueError(f"the row has {len(gold)} boxes: use --task boxes")
    return gold[0]


def has_one_box(completion):
    return len(find_boxes(completion)) == 1


def has_one_place(completion):
    return find_only_point(completion) is not None


def has_boxes(completion):
    return bool(find_boxes(completion)) or completion.strip().endswith("[]")


def is_hit(completion, answer, reward):
    return reward >= HIT


# The forms hold letters, not numbers: a completion that copies them has no box.
FORM = "{{ content }} Reply with %s in JSON alone, as %s."
ONE_BOX, ONE_POINT = '{"bbox_2d": [x1, y1, x2, y2]}', '{"point_2d": [x, y]}'
rewards.TASKS |= {
    "box": rewards.Task(box, template=FORM % ("its box", ONE_BOX), format=has_one_box, exact_match=is_hit),
    "boxes": rewards.Task(
        boxes, template=FORM % ("all boxes", f"[{ONE_BOX}, …]"), format=has_boxes, exact_match=is_hit
    ),
    "point": rewards.Task(point, template=FORM % ("a point", ONE_POINT), format=has_one_place),
}

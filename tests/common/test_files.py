"""Lines of JSON; locks and files that are never incomplete are tested where they are used."""

import datetime
import json
import math

from common.files import json_lines


def test_lines_of_json_hold_only_what_json_knows():
    """Columns of a data set may hold NaN, dates and nested values."""
    row = {"score": math.nan, "scores": [1.5, {"best": -math.inf}], "day": datetime.date(2026, 1, 2), "text": "三 NaN"}
    lines = json_lines([row, {}])
    want = {"score": None, "scores": [1.5, {"best": None}], "day": "2026-01-02", "text": "三 NaN"}
    assert [json.loads(line) for line in lines.splitlines()] == [want, {}]
    assert "三" in lines

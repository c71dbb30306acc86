"""The model and the pictures of the tests are those of the demo."""

import filecmp

import pytest

pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps.demo import tiny as demo
from tests.helpers import tiny
from tests.helpers.scripts import VECTORS


def test_the_saved_model_and_pictures_are_those_of_the_demo(tmp_path):
    tokenizer = demo.byte_tokenizer()
    demo.save(demo.build_model(tokenizer, seed=0), tokenizer, tmp_path / "demo")
    demo.write_shapes(tmp_path / "shapes", 12, [0, 0])
    tiny.save_model(tmp_path / "tests")
    pairs = ((tmp_path / "demo", tmp_path / "tests"), (tmp_path / "shapes", VECTORS / "shapes"))
    for made, saved in (*pairs, (tmp_path / "shapes" / "images", VECTORS / "shapes" / "images")):
        compared = filecmp.dircmp(made, saved)
        assert not (compared.left_only or compared.right_only or compared.diff_files or compared.funny_files)

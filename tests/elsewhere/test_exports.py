"""What this project exports is read elsewhere: the logits of the trained weights, and the tokenizer of the base.

Guards against: a config.json that an older transformers misreads without a word, weights under names that it does not
know, the base's weights in place of the trained ones, a tokenizer that only transformers 5 can load, and stop tokens
that get lost.
"""

import pytest

from tests.elsewhere.bases import LEFT_BEHIND
from tests.elsewhere.cases import ADAPTERS, BASES, DIFFERS, EXPERTS, MADE_BY, READ, WHOLE, folder_of

MODELS = [(place, name, variant) for place, name, variant in READ if variant not in ADAPTERS]
TOLERANCE = 1e-4
IN_BFLOAT16 = [name for name, base in BASES.items() if base.weights == "three shards"]
MERGED_IN_BFLOAT16 = 1e-3  # the sum of a weight and an adapter, in another order, may be rounded to a neighbour


def largest(a, b) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize(("place", "name", "variant"), READ)
def test_the_logits_are_those_of_the_trained_weights(place, name, variant, results):
    """Text and pictures, in float32. The base itself is read, too: if that differs, this test is wrong."""
    read, own, differs = (
        results.read(place, name, variant),
        results.expected(name, variant),
        DIFFERS.get((place, name), {}),
    )
    if WHOLE in differs:
        assert "the config is not understood" in read["model"].get("error", ""), "it is read: change DIFFERS"
        return
    if variant == "experts" and EXPERTS in differs:
        is_refused = "size mismatch" in read["model"].get("error", "")
        assert is_refused or largest(read["model"]["logits"]["text"], own["text"]) > 0.1, "it is read: change DIFFERS"
        return
    assert "error" not in read["model"], read["model"]["error"]
    bound = MERGED_IN_BFLOAT16 if name in IN_BFLOAT16 and variant in MADE_BY else TOLERANCE
    assert read["model"]["loading"] == {}
    assert len(own) == len(read["model"]["logits"]) and ("picture" in own) == bool(BASES[name].image)
    for kind, logits in own.items():
        difference = largest(read["model"]["logits"][kind], logits)
        if kind in differs:
            assert difference > 10 * TOLERANCE, f"{kind} is the same: change DIFFERS"
        else:
            assert difference <= bound, kind


@pytest.mark.parametrize(
    ("name", "variant"), sorted({(name, variant) for _, name, variant in READ if variant != "base"})
)
def test_training_moves_the_logits(name, variant, results):
    """Otherwise, an export with the weights of the base would pass."""
    results.read("newest", name, variant)
    base = results.expected(name, "base")
    for kind, logits in results.expected(name, variant).items():
        assert largest(logits, base[kind]) > 0.1, kind


@pytest.mark.parametrize(("place", "name", "variant"), [case for case in MODELS if case[2] != "base"])
def test_tokenizer_prompt_and_stop_tokens_are_those_of_the_base(place, name, variant, results):
    base, read = results.read(place, name, "base"), results.read(place, name, variant)
    for part in ("tokenizer",) if WHOLE in DIFFERS.get((place, name), {}) else ("tokenizer", "settings"):
        assert "error" not in base[part], base[part]["error"]
        assert "error" not in read[part], read[part]["error"]
        for key, value in base[part].items():
            assert read[part][key] == value, key
        assert read[part].keys() == base[part].keys()


@pytest.mark.parametrize(
    ("name", "variant"), [case[1:] for case in MODELS if case[0] == "newest" and case[2] != "base"]
)
def test_files_of_the_training_and_old_weights_stay_behind(name, variant, results):
    results.read("newest", name, variant)
    folder = folder_of(results.work, name, variant)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert not written & {*LEFT_BEHIND, "original"}
    assert not [path for path in written if path.endswith((".bin", ".gguf", ".pt"))]


@pytest.mark.parametrize("name", [name for name, base in BASES.items() if base.image])
def test_an_adapter_adapts_the_tower_only_if_asked(name, results):
    """PEFT 0.17.1 has to match the same layers: a pattern could also match some in the tower."""
    for place in BASES[name].places:
        model = results.read(place, name, "adapter")["model"]
        if WHOLE not in DIFFERS.get((place, name), {}):
            assert "error" not in model, model["error"]
            towers = [layer for layer in model["adapted"] if "visual" in layer or "vision_tower" in layer]
            assert bool(towers) == BASES[name].tower_adapted

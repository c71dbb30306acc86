"""Shared-prefix packing, compared with a plain forward pass of the unmodified transformers model.

Guards against: attention across completions or groups, positions that do not continue after the image, a first token
predicted from the wrong hidden state, images assigned to the wrong group, and gradients lost where keys are copied.
"""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.varlen

import packing
from common.records import Group
from common.row_copies import RowCopies, copy_rows
from packing import pack, split_groups
from policy import forward
from policy.families import language_model, vision_blocks
from policy.forward import enable_packed_forward, image_features, token_logprobs
from policy.model import Policy, cache_image_features, vision_parameters
from tests.helpers import models
from tests.helpers.models import (
    FAMILIES,
    IMAGE,
    VISION_END,
    VISION_START,
    WITH_IMAGES,
    as_trajectory,
    build,
    groups_of,
    make_group,
    make_trajectory,
    plain_logprobs,
    random_image,
)

# For each group of a pack: number of text tokens, image grids in patches, completion lengths (length 1: just the end
# token).
SHAPES = {
    "one image": [(5, [(4, 4)], [4, 1, 7]), (3, [(2, 6)], [2, 2])],
    "several images": [(4, [(4, 4), (2, 2), (4, 8)], [3, 5]), (6, [(2, 2), (4, 4)], [1, 4, 2])],
    "no image": [(6, [], [4, 1, 6]), (9, [], [3, 3])],
    "text and images in one pack": [
        (7, [], [2, 5]),
        (3, [(4, 4)], [4, 1]),
        (5, [], [1]),
        (2, [(2, 2), (2, 4)], [6, 3]),
    ],
}
CASES = [(f, s) for f in FAMILIES for s in SHAPES if f in WITH_IMAGES or s == "no image"]


def groups_for(model, family, shape):
    g = torch.Generator().manual_seed(1)
    return [make_group(model, family, text, grids, lengths, g) for text, grids, lengths in SHAPES[shape]]


@pytest.mark.parametrize(("family", "shape", "keep"), [(*case, i % 2 == 0) for i, case in enumerate(CASES)])
def test_logprobs_and_gradients_equal_the_plain_forward(family, shape, keep, monkeypatch):
    """Logits are computed for three tokens at a time. In half of the cases, the layers are checkpointed."""
    monkeypatch.setattr(forward, "LOGIT_ROWS", 3)
    plain = build(family)
    packed = copy.deepcopy(plain)
    if not keep:
        packed.train().gradient_checkpointing_enable({"use_reentrant": False})
    compare(plain, packed, groups_for(plain, family, shape), FAMILIES[family].bounds)


@pytest.mark.parametrize("window", [1, 9, 1000])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {}),
        *((name, {"use_sliding_window": True, "max_window_layers": 1}) for name in ("qwen2_5", "qwen2_5_vl")),
    ],
    ids=["gemma3", "qwen2_5", "qwen2_5_vl"],
)
def test_layers_with_a_window_equal_the_plain_forward(family, settings, window):
    """One of the two layers has the window. Prompts and completions are shorter and longer than one of 9 tokens."""
    model, g = build(family, sliding_window=window, **settings), torch.Generator().manual_seed(0)
    groups = [make_group(model, family, prompt, [], [1, 5, 30], g) for prompt in (3, 8, 40)]
    compare(model, copy.deepcopy(model), groups, FAMILIES[family].bounds)


# For each group: number of text tokens, image grids in patches, and completions. These are lists of turns, which hold
# how many tokens the model samples and, in between, the text tokens and images that it then sees.
TURNS = [
    (5, [(4, 4)], [[3, (4, [(2, 2)]), 2], [1, (2, []), 4, (3, [(4, 4), (2, 6)]), 1], [6]]),
    (7, [], [[4, (3, [(6, 2)]), 3], [2, (1, [(2, 2)])], [2, (5, []), 1]]),
    (3, [(2, 2), (2, 4)], [[1, (1, []), 1]]),
]


def episodes_for(model: torch.nn.Module, family: str) -> list[Group]:
    """Return groups of completions with one to three turns each. Those of one turn have no trajectory."""
    g = torch.Generator().manual_seed(3)
    groups, with_images = [], family in WITH_IMAGES
    for text, grids, completions in TURNS:
        group = make_group(model, family, text, grids if with_images else [], [turns[0] for turns in completions], g)
        for i, turns in enumerate(completions):
            turns = [turn if with_images or isinstance(turn, int) else (turn[0], []) for turn in turns]
            if len(turns) > 1:
                group.completions[i] = make_trajectory(model, group.prompt, turns, g)
        groups.append(group)
    return groups


@pytest.mark.parametrize(("family", "keep"), [(family, i % 2 == 0) for i, family in enumerate(FAMILIES)])
def test_several_turns_equal_the_plain_forward(family, keep, monkeypatch):
    """What a model sees between its turns, with images, is in its place, and no such token is predicted."""
    monkeypatch.setattr(forward, "LOGIT_ROWS", 3)
    plain = build(family)
    packed = copy.deepcopy(plain)
    if not keep:
        packed.train().gradient_checkpointing_enable({"use_reentrant": False})
    groups = episodes_for(plain, family)
    assert sum(bool(each.trajectory) for group in groups for each in group.completions) == 6
    compare(plain, packed, groups, FAMILIES[family].bounds)
    lengths, has_image = [5, 6, 6, 7, 2, 3, 2], [True, True, True, True, True, False, True]
    want = torch.tensor(has_image).repeat_interleave(torch.tensor(lengths)) & (family in WITH_IMAGES)
    assert torch.equal(pack(groups).values.has_image, want)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])  # without and with a bias
def test_patches_are_projected_as_the_convolution_does(family):
    model = build(family)
    conv = copy.deepcopy(model.model.visual.patch_embed.proj)
    forward.enable_packed_forward(model)
    projected = model.model.visual.patch_embed.proj
    patches = torch.randn(5, conv.in_channels, *conv.kernel_size)
    expected, got = conv(patches).flatten(1), projected(patches)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for each in (expected, got):
        each.square().sum().backward()
    for want, parameter in zip(conv.parameters(), projected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, want.grad, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_an_image_token_that_the_model_has_sampled_is_no_image(family):
    """Its log-probability and its embedding are those of any token; another with the same embedding stands in for it.

    Images come before and after it, and its positions are those of text.
    """
    model, stand_in = build(family), 201
    embedding = model.get_input_embeddings().weight.data
    embedding[stand_in] = embedding[IMAGE]
    group = make_group(model, family, 5, [(4, 4)], [], torch.Generator().manual_seed(0))
    tokens, vision = random_image(model.config, 2, 4, torch.Generator().manual_seed(1))
    seen = [7, VISION_START, *[IMAGE] * tokens, VISION_END, 8]
    ids = torch.tensor([3, IMAGE, 5, *seen, IMAGE, IMAGE, 9])
    sampled = torch.tensor([True] * 3 + [False] * len(seen) + [True] * 3)
    completion = as_trajectory(model, group.prompt, ids, sampled, [vision])
    assert completion.image_tokens == tokens and completion.ids.tolist() == [3, IMAGE, 5, IMAGE, IMAGE, 9]
    want = plain_logprobs(model, group, completion, stand_in=stand_in)
    enable_packed_forward(model)
    got, _ = token_logprobs(model, pack([replace(group, completions=[completion])]))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def compare(plain: torch.nn.Module, packed: torch.nn.Module, groups: list[Group], bounds: tuple[float, float]) -> None:
    """Compare log-probabilities and gradients of a plain forward pass with those of a packed one in a copy."""
    enable_packed_forward(packed)
    batch = pack(groups)
    weights = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(2))

    want = torch.cat([plain_logprobs(plain, g, r, temperature=0.7) for g in groups for r in g.completions])
    got, entropy = token_logprobs(packed, batch, temperature=0.7)
    assert want.std() > 0.05, "the log-probabilities vary too little for a meaningful comparison"
    torch.testing.assert_close(got, want, atol=bounds[0], rtol=0)
    assert (entropy >= 0).all()

    (want * weights).sum().backward()
    (got * weights).sum().backward()
    compared = 0
    for (name, p), q in zip(plain.named_parameters(), packed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            compared += 1
            scale = max(1.0, p.grad.abs().max().item())
            torch.testing.assert_close(
                q.grad / scale, p.grad / scale, atol=bounds[1], rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert compared > 20


@pytest.mark.parametrize("length", range(12))
def test_no_slice_of_logits_is_a_single_row(length):
    slices = forward._slices(length, 4)
    rows = [list(range(length))[cut] for cut in slices]
    assert list(itertools.chain(*rows)) == list(range(length))
    assert all(2 <= len(cut) <= 5 for cut in rows) or length == 1


def test_completions_do_not_see_each_other():
    model = build("qwen2_5_vl")
    enable_packed_forward(model)
    group = groups_for(model, "qwen2_5_vl", "one image")[0]
    before, _ = token_logprobs(model, pack([group]))
    first_completion = replace(group.completions[0], ids=(group.completions[0].ids + 1) % 200)
    group.completions[0] = first_completion
    after, _ = token_logprobs(model, pack([group]))
    first = len(group.completions[0].ids)
    assert (before[:first] != after[:first]).all()
    assert torch.equal(before[first:], after[first:])


@pytest.mark.parametrize("budget", [1, 20, 30, 50, 70, 10_000])
def test_micro_batches_hold_every_completion_once_within_the_budget(budget):
    model = build("qwen2_5_vl")
    enable_packed_forward(model)
    groups = groups_for(model, "qwen2_5_vl", "text and images in one pack") + episodes_for(model, "qwen2_5_vl")
    whole = pack(groups)
    logp, _ = token_logprobs(model, whole)
    batches = [pack(part) for part in split_groups(groups, budget)]
    assert [length for batch in batches for length in batch.lengths] == whole.lengths
    for batch in batches:
        assert batch.input_ids.shape[1] <= budget or len(batch.lengths) == 1
    got = torch.cat([token_logprobs(model, batch)[0] for batch in batches])
    torch.testing.assert_close(got, logp, atol=1e-5, rtol=0)
    if budget == 10_000:
        assert len(batches) == 1


def test_entropy_is_that_of_the_sampling_distribution():
    model = build("qwen2_5")
    enable_packed_forward(model)
    group = groups_for(model, "qwen2_5", "no image")[0]
    _, entropy = token_logprobs(model, pack([group]), temperature=0.5)
    model.config._attn_implementation_internal = "eager"
    model.model.config._attn_implementation_internal = "eager"
    ids = torch.cat([group.prompt.ids, group.completions[0].ids])[None]
    logits = model(input_ids=ids).logits[0, len(group.prompt.ids) - 1 : -1] / 0.5
    want = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy[: len(want)], want, atol=1e-5, rtol=0)


def test_an_empty_completion_is_refused():
    model = build("qwen2_5")
    group = groups_for(model, "qwen2_5", "no image")[0]
    group.completions[1] = replace(group.completions[1], ids=group.completions[1].ids[:0])
    with pytest.raises(ValueError, match="without tokens"):
        pack([group])


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_kept_image_features_stand_for_their_pixels(family):
    """A frozen tower runs once per image, also for those of later turns.

    Its cached features give the same log-probabilities and gradients as the pixels.
    """
    g = torch.Generator().manual_seed(2)
    model = build(family)
    grids = [[(4, 4)], [], [(2, 2), (4, 8)], [(4, 4)]]
    groups = [make_group(model, family, 20, grids[i], [9, 4], g) for i in range(4)]
    for number, group in enumerate(groups):
        group.prompt.source = f"row {number}"
    for group in groups[:2]:
        group.completions[0] = make_trajectory(model, group.prompt, [2, (3, [(2, 2), (2, 4)]), 4, (1, []), 3], g)
    prompts = [group.prompt for group in groups] + [group.completions[0].trajectory for group in groups[:2]]
    enable_packed_forward(model)
    for parameter in vision_parameters(model):
        parameter.requires_grad_(False)
    want, _ = token_logprobs(model, pack(groups))
    want.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    cache = {}
    cache_image_features(Policy(model), prompts, cache, at_once=30_000)
    assert len(cache) == 5
    vision_blocks(model)[0].forward = None  # from now on the tower must not run
    cache_image_features(Policy(model), prompts, cache)
    model.zero_grad()
    got, _ = token_logprobs(model, pack(groups))
    got.sum().backward()
    assert torch.allclose(got, want, atol=1e-5)
    bound = FAMILIES[family].bounds[1]
    for name, want_gradient in gradients.items():
        got_gradient = dict(model.named_parameters())[name].grad
        assert (got_gradient - want_gradient).norm() <= bound * want_gradient.norm() + 1e-7, name


@pytest.mark.parametrize("family", FAMILIES)
def test_in_half_precision_the_residual_stream_is_float32(family):
    model = build(family).bfloat16()
    groups = groups_for(model, family, "no image")
    enable_packed_forward(model)
    input_dtypes = set()
    for layer in language_model(model).layers:
        layer.register_forward_pre_hook(lambda _, args: input_dtypes.add(("residual", args[0].dtype)))
        projection = layer.self_attn.q_proj if hasattr(layer, "self_attn") else layer.linear_attn.in_proj_qkv
        projection.register_forward_pre_hook(lambda _, args: input_dtypes.add(("attention", args[0].dtype)))
    token_logprobs(model, pack(groups))
    assert input_dtypes == {("residual", torch.float32), ("attention", torch.bfloat16)}


def test_a_deep_stack_in_half_precision_is_nearer_to_float32(monkeypatch):
    monkeypatch.setitem(models.TEXT, "num_hidden_layers", 32)
    model = build("qwen2_5")
    groups = groups_for(model, "qwen2_5", "no image")

    @torch.no_grad()
    def plain() -> torch.Tensor:
        return torch.cat([plain_logprobs(model, g, r.ids) for g in groups for r in g.completions]).float()

    exact = plain()
    model.bfloat16()
    rounded = plain()
    enable_packed_forward(model)
    packed, _ = token_logprobs(model, pack(groups))
    assert (packed - exact).abs().mean() < 0.9 * (rounded - exact).abs().mean()


def test_compiled_logprobs_take_no_float_from_the_host():
    """A float argument would become a float64 tensor, whose C++ kernel would add 40 seconds to the first step."""
    model, graph_inputs = build("qwen2_5"), []
    enable_packed_forward(model)

    def record_inputs(graph: torch.fx.GraphModule, inputs: list):
        graph_inputs.extend(inputs)
        return graph.forward

    model.from_logits = torch.compile(model.from_logits, dynamic=True, backend=record_inputs)
    token_logprobs(model, pack(groups_for(model, "qwen2_5", "no image")), temperature=0.7)
    assert graph_inputs
    assert all(x.dtype != torch.float64 for x in graph_inputs if torch.is_tensor(x))


def test_nothing_is_compiled_unless_asked_for(monkeypatch):
    """On a CPU, or with `--compile false`, compiling would only take time."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it is compiled"))
    enable_packed_forward(build("qwen2_5_vl"))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_the_first_layer_is_compiled_together_with_the_others(family, monkeypatch):
    """Also if image features are inserted before it; when it was not, there were almost half as many graphs again."""
    compile_with, graphs = torch.compile, {}

    def count_graphs(shape: str) -> int:
        def count(graph: torch.fx.GraphModule, _: list):
            graphs[shape] = graphs.get(shape, 0) + 1
            return graph.forward

        torch.compiler.reset()  # forget what was compiled before
        monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, dynamic=True, backend=count))
        model = build(family)
        enable_packed_forward(model, compiled=True)
        batch = pack(groups_for(model, family, shape)[:1])
        # torch.compile takes equal sizes for one: no weight may have as many rows or columns.
        assert batch.input_ids.shape[1] in (17, 25)
        if batch.vision:
            with torch.compiler.set_stance("force_eager"):
                batch = replace(batch, vision={"features": image_features(model, batch.vision)})
        token_logprobs(model, batch)
        return graphs[shape]

    assert count_graphs("one image") == count_graphs("no image") > 3


# Aria's tower counts its patches on the GPU, and GLM-4.6V reads its grids there.
@pytest.mark.parametrize("family", sorted({*WITH_IMAGES} - {"aria", "glm4v"}))
def test_the_host_reads_nothing_that_the_vision_tower_computes(family, monkeypatch):
    """On a GPU, reading it would wait for all queued work; on the meta device, it fails."""
    monkeypatch.setattr(packing, "_has_kernel", lambda q: True)
    model = build(family)
    g = torch.Generator().manual_seed(0)
    batch = pack([make_group(model, family, 5, [(10, 6), (4, 4)], [3], g)])
    enable_packed_forward(model.to("meta"))
    features = image_features(model, batch.vision)
    assert features.device.type == "meta"
    assert len(features) == len(batch.image_tokens)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_compiled_vision_tower_has_the_same_gradients_and_takes_pictures_of_any_size(family, monkeypatch):
    model, compile_with, compiled = build(family), torch.compile, []
    model.requires_grad_(False)
    for parameter in vision_parameters(model):
        parameter.requires_grad_(True)
    # torch.compile takes equal sizes for one: the first picture has as many patches as nothing else.
    grids = [[(10, 6)], [(2, 6), (8, 4)], [(4, 4)], [(2, 2), (4, 4), (6, 2)]]
    g = torch.Generator().manual_seed(1)
    batches = [pack([make_group(model, family, 5, pictures, [3, 4], g)]) for pictures in grids]

    def gradients(batch) -> torch.Tensor:
        model.zero_grad()
        token_logprobs(model, batch)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in vision_parameters(model) if p.grad is not None])

    def count(graph: torch.fx.GraphModule, _: list):
        compiled.append(graph)
        return graph.forward

    enable_packed_forward(model)
    want = [gradients(batch) for batch in batches]
    torch.compiler.reset()  # forget what was compiled before
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, dynamic=True, backend=count))
    enable_packed_forward(model, compiled=True)
    model.from_logits = forward._from_logits
    for layer in language_model(model).layers:
        del layer.forward  # what is compiled is the tower alone
    counts = []
    for batch, gradient in zip(batches, want):
        torch.testing.assert_close(gradients(batch), gradient)
        counts.append(len(compiled))
    assert min(counts) == max(counts) > 0


@pytest.mark.parametrize("window", [1, 2, 5, 11, 30])
def test_a_completion_sees_the_last_tokens_of_its_prompt_and_of_itself(window):
    """Prompts of 10 tokens and completions of 1 to 13, so that windows begin in either or hold both."""
    segments = pack(groups_of([[5, 13], [1]])).segments
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, heads, 8, generator=g) for rows, heads in ((39, 4), (69, 2), (69, 2)))
    cu_lens, max_lens = (segments.cu_q, segments.cu_k), (segments.max_q, segments.max_k)
    got = packing.attend(q, k, v, cu_lens, max_lens, None, (window - 1, 0))
    for start, first_key, queries, keys in zip(segments.cu_q, segments.cu_k, segments.q_lens, segments.k_lens):
        for i in range(queries):
            end = first_key + keys - queries + i + 1
            seen = slice(max(first_key, end - window), end)
            scores = torch.einsum("he,khe->hk", q[start + i], k[seen].repeat_interleave(2, 1)) / 8**0.5
            want = torch.einsum("hk,khe->he", scores.softmax(-1), v[seen].repeat_interleave(2, 1))
            torch.testing.assert_close(got[start + i], want)


def test_gradients_of_copied_rows_are_summed_in_a_fixed_order():
    """Row 1 has three copies, row 2 has none; the many copies of row 5 would be summed in several threads."""
    source = torch.tensor([0, 1, 1, 3, 4, 1] + [5] * 600)
    x, plan = torch.randn(6, 4, 32, requires_grad=True), RowCopies.plan(source, 6)
    weight = torch.randn(len(source), 4, 32)
    (copies := copy_rows(x, plan)).backward(weight)
    assert torch.equal(copies, x[source])
    want = torch.zeros(6, 4, 32, dtype=torch.float64).index_add(0, source, weight.double())
    torch.testing.assert_close(x.grad.double(), want, rtol=0, atol=1e-4)
    first = x.grad.clone()
    for _ in range(20):
        x.grad = None
        copy_rows(x, plan).backward(weight)
        assert torch.equal(x.grad, first)

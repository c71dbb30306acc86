"""How a teacher (`--teacher`) sees the prompts, and whether it can teach this model."""

from common.errors import UserError
from common.records import Sample
from config import Config
from data import Processor, load_processor, validate_rows


def load_teacher_processor(cfg: Config, processor: Processor, samples: list[Sample]) -> Processor:
    """Return what encodes prompts for the teacher: `processor` if the teacher sees them as the policy does.

    Raises UserError if the teacher has another vocabulary, since it is asked about the tokens that the policy samples,
    or if it cannot take the prompt of one of the `samples`.
    """
    pixels = cfg.teacher_pixels or cfg.max_pixels
    try:
        teacher = load_processor(cfg.teacher, cfg.task, cfg.template, cfg.min_pixels, pixels, cfg.chat_template_kwargs)
    except UserError as error:
        raise UserError(f"--teacher {cfg.teacher}: {error}") from None
    ours, theirs = (each.tokenizer.get_vocab() for each in (processor, teacher))
    if ours != theirs:
        token = min((ours.items() ^ theirs.items()), key=lambda pair: pair[1])[0]
        raise UserError(
            f"--teacher {cfg.teacher!r} has another vocabulary than --model {cfg.model!r} (they differ in {token!r}, "
            "for example): choose a teacher that shares it"
        )
    own, its = (each.skeleton.get_input_embeddings().weight.shape[0] for each in (processor, teacher))
    if its < own:
        raise UserError(f"--teacher {cfg.teacher!r} has an embedding of {its} tokens, --model one of {own}")
    sees_the_same = pixels == cfg.max_pixels and _looks_of(teacher) == _looks_of(processor)
    sees_more = any(sample.teacher_images for sample in samples)
    if cfg.env and (sees_more or not sees_the_same):
        problem = "with --env, a teacher sees what the model sees"
        raise UserError(f"--teacher: {problem}: leave --teacher_pixels and the column 'teacher_images' out")
    if sees_more or not sees_the_same:
        validate_rows([sample.for_teacher for sample in samples], cfg.data, None, teacher, keep_duplicates=True)
    return processor if sees_the_same else teacher


def _looks_of(processor: Processor) -> tuple:
    """Return what decides the tokens, pixels and positions of a prompt, besides the flags."""
    images = processor.image_processor.to_dict() if processor.image_processor else None
    return processor.skeleton.config.model_type, processor.tokenizer.chat_template, images

"""Load models and adapters with the transformers and the PEFT of this environment, and write what they give.

    .venv-elsewhere/bin/python -m tests.elsewhere.read JOBS.json

JOBS.json is a list of jobs: `folder`, a model or an adapter; `base`, the model under an adapter; `inputs`, a file with
the inputs of the logits; `output`, the file to write. One call reads many folders, because an import takes seconds.
What cannot be loaded is written as an "error".
"""

import json
import os
import pathlib
import sys
import traceback
import warnings

import torch
import transformers

from tests.elsewhere.logits import last_logits

TEXT = (
    "34+51=? 数学 naïve  façade é\n\n\tdef f(x): return x**2  # <|im_start|>user <|eot_id|><|image_pad|></think> 👩‍🚀"
)
MOST_PARAMETERS = 10**9
TOKENIZER_SETTINGS = ("eos_token", "bos_token", "pad_token", "padding_side", "model_max_length", "all_special_tokens")


def auto_class(config: transformers.PretrainedConfig) -> type:
    multimodal = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM


def read_model(job: dict) -> dict:
    """Return the logits in float32 of a model, or of a base with an adapter, and the keys that did not fit."""
    source = job.get("base") or job["folder"]
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto_class(config).from_config(config).parameters())
    if size > MOST_PARAMETERS:  # before it fills the memory
        raise ValueError(f"the config is not understood: it gives a model of {size / 1e9:.1f} billion parameters")
    model, report = auto_class(config).from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    if job.get("base"):
        import peft

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = peft.PeftModel.from_pretrained(model, job["folder"])
        # PEFT only warns about weights that are missing
        report["missing adapter"] = [str(each.message) for each in caught if "missing" in str(each.message)]
        layers = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
        report_layers = {"adapted": sorted(name.removeprefix("base_model.model.") for name in layers)}
    else:
        report_layers = {}
    report = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    base = model.get_base_model() if job.get("base") else model
    return {"logits": last_logits(base, torch.load(job["inputs"])), "loading": report, **report_layers}


def read_tokenizer(folder: pathlib.Path) -> dict:
    """Return the ids of a text, the text of a chat, the stop tokens and other settings."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    older = folder / "chat_template.json"  # that of the processor
    template = tokenizer.chat_template or json.loads(older.read_text())["chat_template"]
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]
    chat = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True, date_string="1 Jan 2026"
    )
    settings = {name: str(getattr(tokenizer, name)) for name in TOKENIZER_SETTINGS}
    ids = tokenizer(TEXT).input_ids
    return settings | {"ids": ids, "text": tokenizer.decode(ids), "chat": chat, "length": len(tokenizer)}


def read_settings(folder: pathlib.Path) -> dict:
    """Return the generation config with the stop tokens, those of the config, and the image processor's settings."""
    generation = transformers.GenerationConfig.from_pretrained(folder).to_dict()
    config = transformers.AutoConfig.from_pretrained(folder)
    settings = {"generation": generation, "eos in config": config.get_text_config().eos_token_id}
    if (folder / "preprocessor_config.json").is_file():
        settings["image processor"] = _image_processor(folder)
    return settings


def _image_processor(folder: pathlib.Path) -> str:
    """Return the settings of the image processor. Some classes need torchvision; then only the file can be compared."""
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    except (ImportError, ValueError, OSError):
        return json.dumps(json.loads((folder / "preprocessor_config.json").read_text()), sort_keys=True)
    return str(sorted(processor.to_dict().items()))


def read(job: dict) -> dict:
    """Return everything about one folder; a part that fails is its error."""
    parts = {"model": lambda: read_model(job)}
    if not job.get("base"):
        folder = pathlib.Path(job["folder"])
        parts |= {"tokenizer": lambda: read_tokenizer(folder), "settings": lambda: read_settings(folder)}
    result = {}
    for name, part in parts.items():
        try:
            result[name] = part()
        except Exception:  # noqa: BLE001 - the other parts and folders are read all the same; the test shows it
            result[name] = {"error": traceback.format_exc(limit=-3)}
    return result


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for each in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        torch.save(read(each), each["output"])

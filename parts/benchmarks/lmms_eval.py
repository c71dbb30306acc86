"""Print the commands that score a trained run in lmms-eval. `./run.sh eval RUN` calls this module.

    python -m parts.benchmarks.lmms_eval runs/vqa

lmms-eval knows nothing of the prompt that the model was trained with. The prompt is therefore put into a chat template,
`chat_template.jinja` in the run's folder, which lmms-eval's `vllm` model uses.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from common import cli, plugins
from common.templates import template_variables
from data import load_processor, prompt_template
from policy.families import load_tokenizer

LMMS_EVAL_TASKS = "mme,mmstar,mathvista_testmini,mathverse_testmini"
# `{{ content }}` of the training prompt stands between the two texts, which are put before and after each question.
WRAPPER = """{{%- set wrapped = namespace(messages=[]) -%}}
{{%- set before, after = {before}, {after} -%}}
{{%- if {system} and messages[0].role != 'system' -%}}
{{%- set wrapped.messages = [{{'role': 'system', 'content': {system}}}] -%}}
{{%- endif -%}}
{{%- for message in messages -%}}
{{%- if message.role == 'user' and message.content is string -%}}
{{%- set message = {{'role': 'user', 'content': before + message.content + after}} -%}}
{{%- elif message.role == 'user' -%}}
{{%- set texts = [[{{'type': 'text', 'text': before}}], message.content, [{{'type': 'text', 'text': after}}]] -%}}
{{%- set message = {{'role': 'user', 'content': texts | sum(start=[])}} -%}}
{{%- endif -%}}
{{%- set wrapped.messages = wrapped.messages + [message] -%}}
{{%- endfor -%}}
{{%- set messages = wrapped.messages -%}}
"""


def chat_template(model: pathlib.Path | str, task: str, template: str | None, settings: Sequence[str] = ()) -> str:
    """Return the chat template of `model`, changed so that it adds the training prompt of `task` to each question.

    `template` is the Jinja file that replaced the task's own prompt template in training, or None. `settings`: the
    training's `--chat_template_kwargs`.
    """
    system, prompt = prompt_template(task, template)
    before, _, after = prompt.render(content="\0").partition("\0")
    texts = {"before": before, "after": after, "system": system or ""}
    quoted = {name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()}
    original = load_tokenizer(str(model)).chat_template
    variables = template_variables(settings, original)
    set_variables = "".join(f"{{%- set {name} = {value!r} -%}}\n" for name, value in variables.items())
    return set_variables + WRAPPER.format(**quoted) + original


def main(folder: str, *user_flags: str) -> None:
    run = pathlib.Path(folder)
    config = plugins.read_settings(run / "config.json", model=str, task=str, template=str | None)
    for file in plugins.find(list(user_flags), "") or config.get("plugin", []):  # the task may come from a plugin
        plugins.load(file)
    is_adapter = (run / "final" / "adapter_config.json").is_file()
    trained = config["model"] if is_adapter else run / "final"
    template = run / "chat_template.jinja"
    settings = config.get("chat_template_kwargs", [])
    template.write_text(chat_template(trained, config["task"], config.get("template"), settings))
    print("The same model in lmms-eval (pip install lmms-eval in a separate environment with vLLM and transformers 5):")
    model = run / "final"
    if is_adapter:
        model = run / "merged"
        merge = f"--base_model {config['model']} --lora_model {run}/final --output_path {model}"
        print(f"  .venv/bin/python merge_lora.py {merge}")
    limits = {name: config[name] for name in ("min_pixels", "max_pixels")}
    preparation = load_processor(str(trained), config["task"], config.get("template"), **limits).preparation
    options = {name: config.get(name, value) for name, value in preparation.vllm_options.items()} if preparation else {}
    arguments = f"model={model},chat_template={template},dtype=bfloat16,max_model_len=32768,max_new_tokens=2048"
    print(
        f"  lmms-eval --model vllm --tasks {LMMS_EVAL_TASKS} --batch_size 64 --process-docs-parallel 1 --log_samples "
        f"--output_path {run}/lmms-eval \\\n    --model_args "
        f"'{arguments},mm_processor_kwargs={json.dumps(options, separators=(',', ':'))}'"
    )


if __name__ == "__main__":
    cli.run(lambda arguments: main(*arguments), sys.argv[1:])

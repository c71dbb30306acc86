# ./run.sh zoom: a tiny vision-language model learns where to look, with a tool that enlarges a part of its picture.
# Sourced by run.sh. All seeds of GRPO begin at the same warm start.
run=runs/zoom tiny=runs/tiny/zoom-1

heading "1/4  A tiny model that calls the tool at random places, and its pictures"
show .venv/bin/python -m apps.demo.zoom --seed 1 --output "$tiny"

heading "2/4  GRPO, scored on held-out pictures before, during and after training"
show .venv/bin/python grpo.py --plugin examples/zoom.py --env zoom --max_turns 2 --task vqa \
  --template recipes/zoom.jinja --model "$tiny/model" --data "$tiny/train/data.jsonl" \
  --eval_data "$tiny/test/data.jsonl" --output "$run" --overwrite --seed "$seed" --train_vision \
  --min_pixels 1764 --max_pixels 1764 --max_prompt_length 48 --max_completion_length 24 \
  --max_steps 50 --eval_every 10 --learning_rate 3e-4 "${given_flags[@]}"

title="3/4  Before and after, on the same held-out pictures" evaluate_run "$run"
title="4/4  Without the pictures, of which only the size is left" evaluate_run "$run" --picture blank \
  --baseline "$run/eval" --output "$run/blank"

# ./run.sh and ./run.sh digits: a tiny vision-language model learns on this machine in minutes.
# Sourced by run.sh with $recipe set to demo or digits.
case $recipe in
  demo)
    kind=count task=count suffix=''
    train_flags=(--max_steps 60 --eval_every 5 --learning_rate 5e-5 --beta 0.02) ;;
  digits)
    kind=digits task=vqa suffix=/data.jsonl
    train_flags=(--max_steps 50 --eval_every 10 --learning_rate 1e-4 --beta 0.02) ;;
esac
family=${MODEL_FAMILY:-qwen2_5_vl}
suffix_of_family=${MODEL_FAMILY:+-$family}
run=runs/$recipe$suffix_of_family tiny=runs/tiny/$kind-$seed$suffix_of_family

heading "1/4  A tiny model ($family) and its data"
show .venv/bin/python -m apps.demo.tiny --task "$kind" --seed "$seed" --family "$family" --output "$tiny"

heading "2/4  GRPO, scored on held-out images before, during and after training"
show .venv/bin/python grpo.py --task "$task" --model "$tiny/model" --data "$tiny/train$suffix" \
  --eval_data "$tiny/test$suffix" --output "$run" --overwrite --seed "$seed" --max_completion_length 64 \
  "${train_flags[@]}" "${given_flags[@]}"

title="3/4  Before and after, on the same held-out images" evaluate_run "$run"
title="4/4  Without the images, of which only the size is left" evaluate_run "$run" --picture blank \
  --baseline "$run/eval" --output "$run/blank"

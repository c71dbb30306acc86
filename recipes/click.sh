# ./run.sh click: where to click, with the settings of UI-R1, scored on ScreenSpot before and after training. The flags
# are in click.flags. Sourced by run.sh.
data='' test_data=rootsautomation/ScreenSpot@test
eval_flags=(--benchmark screenspot --template recipes/click.jinja --max_completion_length 1024)

echo "Expected on ScreenSpot: 55.5 before and 83.3 after, as UI-R1 publishes (github.com/lll6gg/UI-R1). This recipe has" \
  "not been run on real weights"
if [ -z "${smoke}${DATA:-}" ]; then
  show .venv/bin/python -m recipes.click_rows --output runs/click-rows
  data=runs/click-rows/train.jsonl
fi

smoke_data() {
  data=$1/train.jsonl test_data=$1/test.jsonl
  eval_flags=(--benchmark screenspot --template recipes/click.jinja)
  smoke_flags+=(--min_pixels 3136 --max_pixels 7056)
}

// The service's page: data sets, the form, jobs, and one job live. Nothing here leaves the machine.
"use strict";

const $ = (id) => document.getElementById(id);
let shown = null; // the job on show
let source = null; // its events
let rows = []; // its metrics

async function call(path, options = {}) {
  const reply = await fetch(path, options);
  const body = await reply.json().catch(() => ({}));
  if (reply.ok) return body;
  const detail = body.detail ?? reply.statusText;
  const text = (each) => (each.msg ? `${each.loc.at(-1)}: ${each.msg}` : each);
  throw new Error(Array.isArray(detail) ? detail.map(text).join("; ") : detail);
}

function make(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = kind;
  return made;
}

// --- pictures

function upload(file) {
  const request = new XMLHttpRequest(); // fetch says nothing about how far an upload is
  const form = new FormData();
  form.append("file", file);
  request.upload.onprogress = (e) => ($("uploading").textContent = `${file.name}: ${Math.round((100 * e.loaded) / e.total)} %`);
  request.onload = () => {
    const body = JSON.parse(request.responseText || "{}");
    $("uploading").className = request.status < 300 ? "soft" : "bad";
    $("uploading").textContent = request.status < 300 ? `${file.name} is here` : String(body.detail);
    $("zip").value = "";
    showFiles(body.file_id);
  };
  request.onerror = () => ($("uploading").textContent = "the service cannot be reached");
  request.open("POST", "/upload-data");
  request.send(form);
}

async function showFiles(chosen) {
  const files = await call("/files");
  const select = $("train").elements.data_file_id;
  const kept = chosen ?? select.value;
  select.replaceChildren(...files.map((file) => new Option(`${file.filename} (${file.csv_rows} rows)`, file.file_id)));
  if (files.some((file) => file.file_id === kept)) select.value = kept;
  $("files").replaceChildren(...files.map(fileItem));
}

function fileItem(file) {
  const item = make("div", "", "item");
  const row = make("div", "", "row");
  row.append(make("b", file.filename, "grow"), make("span", `${file.csv_rows} rows, ${file.valid_images} pictures`, "soft"));
  const remove = make("button", "Delete", "quiet");
  remove.onclick = () => call(`/files/${file.file_id}`, { method: "DELETE" }).then(() => showFiles(), (e) => alert(e.message));
  row.append(remove);
  const pictures = make("div", "", "pictures");
  for (let i = 0; i < Math.min(8, file.valid_images); i++) pictures.append(figure(file.file_id, i));
  item.append(row, ...file.problems.map((problem) => make("p", problem, "bad")), pictures);
  return item;
}

function figure(id, number) {
  const made = make("figure");
  const image = make("img");
  const caption = make("figcaption", "", "soft");
  image.alt = "";
  fetch(`/files/${id}/picture/${number}`).then(async (reply) => {
    if (!reply.ok) return made.remove();
    caption.textContent = `${decodeURIComponent(reply.headers.get("x-question"))} ${decodeURIComponent(reply.headers.get("x-answer"))}`;
    image.src = URL.createObjectURL(await reply.blob());
  });
  made.append(image, caption);
  return made;
}

$("zip").onchange = () => $("zip").files[0] && upload($("zip").files[0]);
for (const name of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]);
  });
}

// --- training

$("train").onsubmit = async (event) => {
  event.preventDefault();
  const fields = $("train").elements;
  const numbers = (names) => Object.fromEntries(names.map((name) => [name, Number(fields[name].value)]));
  const names = ["num_epochs", "learning_rate", "batch_size", "gradient_accumulation_steps", "num_generations"];
  const body = {
    job_name: fields.job_name.value,
    data_file_id: fields.data_file_id.value,
    base_model_path: fields.base_model_path.value || null,
    training_config: { ...numbers([...names, "temperature", "max_image_size", "seed"]), use_4bit: fields.use_4bit.checked },
    lora_config: numbers(["r", "lora_alpha"]),
  };
  try {
    $("trouble").textContent = body.data_file_id ? "" : "upload pictures first";
    if (!body.data_file_id) return;
    const headers = { "Content-Type": "application/json" };
    const started = await call("/train", { method: "POST", headers, body: JSON.stringify(body) });
    await showJobs();
    show(started.job_id);
  } catch (error) {
    $("trouble").textContent = error.message;
  }
};

// --- jobs

async function showJobs() {
  const jobs = await call("/jobs").catch(() => null);
  if (!jobs || !jobs.length) return;
  $("jobs").replaceChildren(...jobs.reverse().map(jobItem));
}

function jobItem(job) {
  const item = make("div", "", "item row");
  const open = make("button", job.job_name, "quiet");
  open.onclick = () => show(job.job_id);
  const how = `step ${job.current_step} of ${job.total_steps}`;
  item.append(open, make("span", how, "soft grow"), make("span", job.status, `status ${job.status}`));
  return item;
}

function show(id) {
  source?.close();
  [shown, rows] = [id, []];
  $("job").hidden = false;
  $("said").textContent = "";
  $("completions").src = `/jobs/${id}/completions`;
  draw();
  source = new EventSource(`/jobs/${id}/events`);
  source.addEventListener("metrics", (event) => {
    const row = JSON.parse(event.data);
    rows = [...rows.filter((old) => old.step < row.step), row];
    draw();
  });
  source.addEventListener("job", (event) => state(JSON.parse(event.data)));
  $("job").scrollIntoView({ behavior: "smooth" });
}

function state(job) {
  $("name").textContent = job.job_name;
  $("status").textContent = job.status;
  $("status").className = `status ${job.status}`;
  $("progress").value = job.progress;
  const number = (value) => (value == null ? "–" : value.toFixed(3));
  $("numbers").textContent = `step ${job.current_step} of ${job.total_steps} · reward ${number(job.reward)} · loss ${number(job.loss)}`;
  $("error").textContent = job.error_message ?? "";
  const over = !["queued", "training"].includes(job.status);
  $("cancel").hidden = over;
  $("resume").hidden = !["failed", "cancelled"].includes(job.status);
  $("download").hidden = $("predict").hidden = job.status !== "completed";
  $("download").href = `/jobs/${job.job_id}/download`;
  if (over) source.close(); // else the browser would connect again and again
  if (job.current_step % 5 === 0 || over) $("completions").src = `/jobs/${job.job_id}/completions`;
  if ($("log").open) showLog();
  showJobs();
}

async function showLog() {
  const reply = await fetch(`/jobs/${shown}/logs`);
  $("log").querySelector("pre").textContent = await reply.text();
}

$("log").ontoggle = () => $("log").open && showLog();
$("cancel").onclick = () => call(`/jobs/${shown}`, { method: "DELETE" }).catch((e) => ($("error").textContent = e.message));
$("resume").onclick = () =>
  call(`/jobs/${shown}/resume`, { method: "POST" }).then(() => show(shown), (e) => ($("error").textContent = e.message));
$("predict").onsubmit = async (event) => {
  event.preventDefault();
  $("said").textContent = "…";
  const asked = { method: "POST", body: new FormData($("predict")) };
  $("said").textContent = await call(`/jobs/${shown}/predict`, asked).then((reply) => reply.answer, (e) => e.message);
};

// --- curves

function draw() {
  curve($("reward"), "reward", rows.map((row) => [row.step, row.reward]), "#0b7a75");
  curve($("loss"), "loss", rows.map((row) => [row.step, row.loss]), "#d1495b");
}

function curve(svg, name, points, colour) {
  points = points.filter(([, y]) => Number.isFinite(y));
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const [left, right] = [Math.min(...xs, 1), Math.max(...xs, 2)];
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (!(high > low)) [low, high] = [(low || 0) - 0.5, (high || 0) + 0.5];
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  const x = (value) => 56 + (330 * (value - left)) / (right - left);
  const y = (value) => 170 - (140 * (value - low)) / (high - low);
  const line = points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  const text = (a, b, words, anchor = "end") =>
    `<text x="${a}" y="${b}" font-size="12" fill="#6b7683" text-anchor="${anchor}">${words}</text>`;
  svg.setAttribute("aria-label", `${name} over steps`);
  svg.dataset.points = points.length;
  svg.innerHTML =
    text(56, 18, name, "start") + text(52, 34, high.toPrecision(2)) + text(52, 174, low.toPrecision(2)) +
    text(56, 190, `step ${left}`, "start") + text(386, 190, right) +
    `<polyline points="${line}" fill="none" stroke="${colour}" stroke-width="2"/>` +
    (points.length ? "" : text(216, 105, "nothing yet", "middle"));
}

showFiles();
showJobs();
setInterval(() => !document.hidden && showJobs(), 5000);

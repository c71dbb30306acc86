// The page of the service: data sets, the training form, the list of jobs, and a live view of one job. The page loads
// nothing from other machines.
"use strict";

const $ = (id) => document.getElementById(id);
let jobs = []; // all jobs, in the order in which they were queued
let shownId = null; // id of the shown job; also in the URL's hash
let job = null; // the latest state of the shown job
let source = null; // the event stream of the shown job
let metrics = []; // metrics of the shown job, one row per step
let pace = null; // {step, time} of the first step that this page saw, and `last`, the time of the newest step
let cancelledId = null; // id of the job whose Cancel button was pressed
let painting = false;

async function fetchOk(path, options = {}) {
  const response = await fetch(path, options).catch(() => null);
  setReachable(response !== null);
  if (!response) throw new Error("the service cannot be reached");
  if (response.ok) return response;
  throw new Error(errorDetail(await response.json().catch(() => ({})), response.status));
}

const fetchJson = async (path, options) => (await fetchOk(path, options)).json();

function errorDetail(body, status) {
  const text = (problem) => (problem.msg ? `${problem.loc.at(-1)}: ${problem.msg}` : problem);
  return [body.detail ?? `the service could not do this (status ${status})`].flat().map(text).join("; ");
}

function setReachable(reachable) {
  const wasReachable = !$("lost").textContent;
  if (wasReachable === reachable) return;
  $("lost").textContent = reachable ? "" : "Connection lost, trying again …";
  if (!reachable) return;
  showFiles();
  if (shownId) loadSamples();
  if (shownId && source.readyState !== EventSource.OPEN) listen();
}

function makeElement(tag, text = "", className = "", ...children) {
  const element = Object.assign(document.createElement(tag), { textContent: text, className });
  element.append(...children);
  return element;
}

// The service gives times in UTC, without an offset.
const formatTime = (time) => new Date(`${time}Z`).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

function formatDuration(seconds) {
  if (seconds < 2) return "a moment";
  if (seconds < 90) return `${Math.round(seconds)} seconds`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} minutes`;
  return `${(seconds / 3600).toFixed(1)} hours`;
}

// --- pictures

function upload(file) {
  const request = new XMLHttpRequest(); // fetch does not report the progress of an upload
  const form = new FormData();
  form.append("file", file);
  const say = (text, className = "soft") => Object.assign($("uploading"), { textContent: `${file.name} ${text}`, className });
  request.upload.onprogress = (e) => say(`is uploading: ${Math.round((100 * e.loaded) / e.total)} %`);
  request.upload.onload = () => say("is being checked …");
  request.onload = () => {
    const body = request.response ?? {};
    if (request.status === 200) say("was uploaded");
    else say(`was rejected: ${errorDetail(body, request.status)}`, "bad");
    showFiles(body.file_id);
  };
  request.onerror = () => say("could not be uploaded. Is the service running? Is the file too large?", "bad");
  request.responseType = "json";
  request.open("POST", "/upload-data");
  request.send(form);
  $("zip").value = ""; // so that the same file can be chosen again
}

async function showFiles(newId) {
  const files = await fetchJson("/files").catch(() => null);
  if (!files) return;
  files.reverse(); // newest first
  const select = $("train").elements.data_file_id;
  const selectedId = newId ?? select.value;
  const option = (file) => new Option(`${file.filename}, ${formatTime(file.upload_time)}`, file.file_id);
  select.replaceChildren(...files.map(option));
  if (files.some((file) => file.file_id === selectedId)) select.value = selectedId;
  if (select.ariaInvalid === "true") validate(select);
  $("files").replaceChildren(...files.map((file, index) => fileItem(file, index === 0)));
}

function fileItem(file, open) {
  const item = makeElement("details", "", "fold");
  const details = `${formatTime(file.upload_time)} · ${file.csv_rows} rows, ${file.valid_images} pictures`;
  const summary = makeElement("summary", "", "", makeElement("b", file.filename), makeElement("small", details));
  const pictures = makeElement("div", "", "pictures");
  const message = makeElement("p", "", "bad");
  const remove = makeElement("button", "Delete these pictures", "quiet");
  if (file.problems.length) summary.append(makeElement("small", "some rows cannot be used", "bad"));
  pictures.tabIndex = 0; // so that the keyboard can scroll the pictures
  remove.onclick = () => deleteFile(file).catch((error) => (message.textContent = error.message));
  item.ontoggle = () => {
    if (!item.open || pictures.children.length) return;
    for (let i = 0; i < Math.min(8, file.valid_images); i++) pictures.append(figure(file.file_id, i));
  };
  item.append(summary, pictures, ...file.problems.map((problem) => makeElement("p", problem, "bad")), remove, message);
  item.open = open;
  return item;
}

async function deleteFile(file) {
  const consequences = "Jobs that wait for these pictures or train on them must be cancelled first. Finished jobs keep " +
    "what they have learned. Cancelled and failed jobs cannot be resumed without the pictures.";
  if (!confirm(`Delete ${file.filename}?\n\n${consequences}`)) return;
  await fetchJson(`/files/${file.file_id}`, { method: "DELETE" }).catch((error) => {
    throw new Error(jobs.reduce((text, each) => text.replace(each.job_id, `“${each.job_name}”`), error.message));
  });
  $("uploading").textContent = "";
  await showFiles();
}

function figure(fileId, number) {
  const [image, caption] = [makeElement("img"), makeElement("figcaption", "", "soft")];
  const element = makeElement("figure", "", "", image, caption);
  const header = (response, name) => decodeURIComponent(response.headers.get(name));
  const show = async (response) => {
    caption.textContent = `${header(response, "x-question")} ${header(response, "x-answer")}`;
    image.src = URL.createObjectURL(await response.blob());
    image.onload = () => URL.revokeObjectURL(image.src);
  };
  image.alt = `picture ${number + 1}`;
  fetchOk(`/files/${fileId}/picture/${number}`).then(show).catch(() => element.remove());
  return element;
}

$("zip").onchange = () => $("zip").files[0] && upload($("zip").files[0]);
for (const name of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]);
  });
  // Without this, a file dropped outside the target would replace the page.
  addEventListener(name, (event) => event.target.type !== "file" && event.preventDefault());
}

// --- forms

function validationError({ validity, type, tagName, required, value, min, max }) {
  if (tagName === "SELECT" && !value) return "upload pictures first";
  if (type === "file" && !value) return "choose a picture";
  if (type === "number" && !value) return "enter a number";
  if (validity.rangeUnderflow) return `at least ${min}`;
  if (validity.rangeOverflow) return `at most ${max}`;
  if (validity.stepMismatch) return "enter a whole number";
  return required && !value.trim() ? "this field is required" : "";
}

function validate(field) {
  const error = validationError(field);
  const label = field.closest("label");
  (label.querySelector(".bad") ?? label.appendChild(makeElement("small", "", "bad"))).textContent = error;
  field.setAttribute("aria-invalid", Boolean(error));
  return error;
}

function hasErrors(form) {
  const invalid = [...form.elements].filter((field) => field.name && validate(field));
  for (const field of invalid) if (field.closest("details")) field.closest("details").open = true;
  invalid[0]?.focus();
  return invalid.length > 0;
}

for (const form of [$("train"), $("predict")]) {
  form.addEventListener("input", (event) => event.target.ariaInvalid === "true" && validate(event.target));
}

$("train").onsubmit = async (event) => {
  event.preventDefault();
  if (hasErrors($("train"))) return;
  const fields = $("train").elements;
  const numbers = (names) => Object.fromEntries(names.map((name) => [name, Number(fields[name].value)]));
  const names = ["num_epochs", "learning_rate", "batch_size", "gradient_accumulation_steps", "num_generations"];
  const body = {
    job_name: fields.job_name.value.trim(),
    data_file_id: fields.data_file_id.value,
    base_model_path: fields.base_model_path.value.trim() || null,
    training_config: { ...numbers([...names, "temperature", "max_image_size", "seed"]), use_4bit: fields.use_4bit.checked },
    lora_config: numbers(["r", "lora_alpha"]),
  };
  const button = $("train").querySelector("button");
  const headers = { "Content-Type": "application/json" };
  button.disabled = true; // pressing the button twice would start a second job
  try {
    $("trouble").textContent = "";
    location.hash = (await fetchJson("/train", { method: "POST", headers, body: JSON.stringify(body) })).job_id;
    refresh(); // the job may be the one that is shown, which is then resumed
    $("job").hidden = false;
    $("job").scrollIntoView();
  } catch (error) {
    $("trouble").textContent = error.message;
  }
  button.disabled = false;
};

// --- jobs

const active = (each) => each.status === "training"; // waiting jobs, too
const phase = (each) => (each.waiting ? "waiting" : each.status);

async function refresh() {
  jobs = await fetchJson("/jobs").catch(() => jobs);
  if (!shownId) chooseJob();
  const current = jobs.find((each) => each.job_id === shownId);
  // The job was resumed in another window, or the last connection was refused.
  if (current && active(current) && (source?.readyState ?? EventSource.CLOSED) === EventSource.CLOSED) listen();
  paint();
}

function chooseJob() {
  const hashId = location.hash.slice(1);
  const named = jobs.find((each) => each.job_id === hashId);
  const next = named ?? jobs.find((each) => phase(each) === "training") ?? jobs.at(-1);
  if (!next) return;
  if (!named) history.replaceState(null, "", `#${next.job_id}`);
  if (next.job_id !== shownId) showJob(next.job_id);
}

function hideJob() {
  source.close();
  [shownId, job, $("job").hidden] = [null, null, true];
}

function showJob(id) {
  [shownId, metrics, pace, samplesHtml] = [id, [], null, ""];
  job = jobs.find((each) => each.job_id === id) ?? null;
  $("job").hidden = false;
  for (const name of ["said", "wrong"]) $(name).textContent = "";
  [$("completions").hidden, $("newer").hidden, $("nothing").hidden] = [true, true, false];
  loadSamples(true);
  listen();
  if ($("log").open) showLog();
  paint();
}

function listen() {
  source?.close();
  source = new EventSource(`/jobs/${shownId}/events`);
  source.onopen = () => setReachable(true);
  source.onerror = () => {
    if (job && !active(job)) source.close(); // the stream is complete; the browser would reconnect forever
    else setReachable(false);
  };
  source.addEventListener("job", (event) => updateJob(JSON.parse(event.data)));
  source.addEventListener("metrics", (event) => {
    for (const row of JSON.parse(event.data)) {
      while (metrics.length && metrics.at(-1).step >= row.step) metrics.pop(); // the job resumed from an earlier step
      metrics.push(row);
    }
    schedulePaint();
  });
}

function updateJob(current) {
  const previous = job;
  job = current;
  jobs = jobs.map((each) => (each.job_id === current.job_id ? current : each));
  if (!active(current) && current.job_id === cancelledId) cancelledId = null;
  const step = current.current_step;
  if (phase(current) !== "training" || !step || step < pace?.step) pace = null;
  if (phase(current) === "training" && step) pace ??= { step, time: Date.now() };
  if (pace && step !== previous?.current_step) pace.last = Date.now();
  const moved = previous && phase(previous) !== phase(current);
  if (moved || !previous) refresh(); // the queue has moved
  if (moved || (previous && step !== previous.current_step)) scheduleSamples();
  schedulePaint();
}

function schedulePaint() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(paint);
}

function paint() {
  painting = false;
  listJobs();
  if (job) paintJob();
  const label = (name) => `${name} over ${metrics.length} steps`;
  drawCurve($("reward"), label("score"), metrics.map((row) => [row.step, row.reward]), "#0b6e69", [0, 1]);
  if ($("log").open) drawCurve($("loss"), label("loss"), metrics.map((row) => [row.step, row.loss]), "#b8405a");
}

function listJobs() {
  const list = $("jobs");
  $("none").hidden = jobs.length > 0;
  for (const item of [...list.children]) if (!jobs.some((each) => item.hash === `#${each.job_id}`)) item.remove();
  [...jobs].reverse().forEach((each, index) => {
    const existing = [...list.children].find((item) => item.hash === `#${each.job_id}`);
    const item = existing ?? jobItem(each);
    item.querySelector("small").textContent = `${formatTime(each.created_at)} · ${progressText(each)}`;
    Object.assign(item.lastChild, { textContent: statusText(each), className: `status ${phase(each)}` });
    item.setAttribute("aria-current", each.job_id === shownId);
    // Move an item only if needed: a moved item loses the keyboard focus.
    if (list.children[index] !== item) list.insertBefore(item, list.children[index] ?? null);
  });
}

function jobItem(each) {
  const words = makeElement("span", "", "grow", makeElement("b", each.job_name, "clamp"), makeElement("small"));
  const onclick = () => $("job").scrollIntoView();
  return Object.assign(makeElement("a", "", "row", words, makeElement("span")), { href: `#${each.job_id}`, title: each.job_name, onclick });
}

const stopping = (each) => each.stopping || (phase(each) === "training" && each.job_id === cancelledId);
const statusText = (each) => (stopping(each) ? "stopping" : phase(each));

function progressText(each) {
  if (!each.waiting) return `step ${each.current_step} of ${each.total_steps}`;
  const position = 1 + jobs.filter((other) => other.waiting).findIndex((other) => other.job_id === each.job_id);
  if (!position) return "waiting in line";
  const ending = Math.floor(position / 10) % 10 === 1 ? "th" : ["th", "st", "nd", "rd"][position % 10] ?? "th";
  return `${position}${ending} in line`;
}

function paintJob() {
  const number = (value) => (value == null ? "–" : value.toFixed(2).replace(/^-(0\.0+)$/, "$1"));
  const right = job.answers ? ` · ${job.right_answers} of ${job.answers} exactly right` : "";
  const heldOut = job.held_out_rows && `${number(job.score_before)} → ${number(job.score_after)}`;
  const scores = heldOut
    ? [[`Score on ${job.held_out_rows} rows held out`, heldOut], ["Newest step", number(job.reward) + right]]
    : [["Score of the newest step", number(job.reward) + right]];
  const facts = [...scores, ["Progress", progressText(job)], ["Time", timeText()]];
  const fact = ([name, text]) => makeElement("div", "", "", makeElement("dt", name), makeElement("dd", text));
  $("name").textContent = job.job_name;
  Object.assign($("status"), { textContent: statusText(job), className: `status ${phase(job)}` });
  $("progress").value = job.progress;
  $("facts").replaceChildren(...facts.filter(([, text]) => text).map(fact));
  if ($("note").textContent !== noteText()) $("note").textContent = noteText(); // screen readers read out every change
  $("error").textContent = [job.error_message, job.damage].filter(Boolean).join("; ");
  $("cancel").hidden = !active(job);
  $("cancel").disabled = stopping(job) || job.job_id === cancelledId;
  $("delete").hidden = active(job);
  $("resume").hidden = !["failed", "cancelled"].includes(job.status);
  $("download").hidden = $("predict").hidden = job.status !== "completed";
  $("download").href = `/jobs/${job.job_id}/download`;
}

function noteText() {
  if (stopping(job)) return "Stopping. The job saves what it has learned first.";
  if (job.waiting) return "This job starts automatically when the jobs before it have finished.";
  if (job.status === "training") return job.current_step ? "" : "Getting ready: the model is being loaded.";
  return job.status === "cancelled" ? "Resume continues from what the job has saved." : "";
}

function timeText() {
  const spent = metrics.reduce((sum, row) => sum + (row.step_time ?? 0), 0);
  const spentText = spent && formatDuration(spent) + (active(job) ? " so far" : "");
  const steps = pace && !stopping(job) ? job.current_step - pace.step : 0;
  const left = ((pace?.last - pace?.time) / 1000 / steps) * (job.total_steps - job.current_step);
  return [spentText, steps >= 2 && `about ${formatDuration(left)} left`].filter(Boolean).join(", ");
}

const jobRequest = (method, path) => fetchJson(`/jobs/${shownId}${path}`, { method });

$("cancel").onclick = async () => {
  cancelledId = shownId;
  $("wrong").textContent = "";
  paint();
  await jobRequest("DELETE", "").catch((error) => {
    $("wrong").textContent = error.message;
    cancelledId = null;
  });
  refresh();
};

$("delete").onclick = async () => {
  if (!confirm(`Delete ${job.job_name}?\n\nIts result and its answers are deleted. The pictures stay.`)) return;
  $("wrong").textContent = "";
  await jobRequest("POST", "/delete").then(hideJob, (error) => ($("wrong").textContent = error.message));
  refresh();
};

$("resume").onclick = async () => {
  $("wrong").textContent = "";
  $("resume").disabled = true;
  cancelledId = null;
  await jobRequest("POST", "/resume").then(() => showJob(shownId), (error) => ($("wrong").textContent = error.message));
  $("resume").disabled = false;
};

$("predict").onsubmit = async (event) => {
  event.preventDefault();
  if (hasErrors($("predict"))) return;
  const [button, jobId] = [$("predict").querySelector("button"), shownId];
  $("said").textContent = "Looking at the picture; this may take a minute …";
  button.disabled = true;
  const options = { method: "POST", body: new FormData($("predict")) };
  const answer = await fetchJson(`/jobs/${jobId}/predict`, options).then((body) => body.answer, (error) => error.message);
  if (jobId === shownId) $("said").textContent = answer;
  button.disabled = false;
};

// --- sampled answers and the log

// Hides what users of this page do not need of the completions page: its heading, paths on the server, advantages.
const SAMPLES_STYLE = `<style>body { margin: 0 auto; } h1, h1 + p, .source, th:nth-child(2), td:nth-child(2) { display: none; }
  article:first-of-type { border: 0; } figure { flex-basis: 9em; } th { font-size: 0; padding: 4px 9px; }
  th::after { font-size: 14px; content: "answer"; } th:first-child::after { content: "score"; }</style>`;
let samplesHtml = ""; // the completions page that is shown
let samplesTimer = null;

function scheduleSamples() {
  if (!active(job)) loadSamples();
  else samplesTimer ??= setTimeout(() => loadSamples(), 3000); // the page is written shortly after its step is reported
}

async function loadSamples(force = false) {
  clearTimeout(samplesTimer);
  samplesTimer = null;
  const [frame, jobId] = [$("completions"), shownId];
  const isReading = () => !force && frame.contentWindow?.scrollY > 0; // new answers must not move text that is being read
  const load = () => fetchOk(`/jobs/${jobId}/completions`).then((response) => response.text(), () => samplesHtml);
  const text = isReading() ? "" : await load();
  if (jobId !== shownId) return;
  $("newer").hidden = !isReading();
  if (isReading() || text === samplesHtml || !text.includes("<article")) return;
  samplesHtml = text;
  frame.srcdoc = text + SAMPLES_STYLE; // the sandbox runs no scripts
  [frame.hidden, $("nothing").hidden] = [false, true];
}

async function showLog() {
  const jobId = shownId;
  const text = await fetchOk(`/jobs/${jobId}/logs`).then((response) => response.text(), (error) => error.message);
  if (jobId === shownId) $("log").querySelector("pre").textContent = text;
}

$("newer").onclick = () => loadSamples(true);
$("log").ontoggle = () => $("log").open && (showLog(), schedulePaint());

// --- curves

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function downsample(points, maxPoints = 300) {
  const size = Math.max(1, points.length / maxPoints);
  const means = [];
  for (let start = 0; start < points.length; start += size) {
    const bin = points.slice(Math.floor(start), Math.floor(start + size));
    means.push([mean(bin.map((p) => p[0])), mean(bin.map((p) => p[1]))]);
  }
  return means;
}

function movingAverage(points) {
  const radius = points.length < 12 ? 0 : Math.ceil(points.length / 30);
  return points.map(([x], i) => [x, mean(points.slice(Math.max(0, i - radius), i + radius + 1).map((p) => p[1]))]);
}

function drawCurve(svg, label, points, colour, range) {
  points = points.filter(([, y]) => Number.isFinite(y));
  const [left, right] = [points[0]?.[0] ?? 1, Math.max(points.at(-1)?.[0] ?? 2, (points[0]?.[0] ?? 1) + 1)];
  const raw = downsample(points);
  const ys = raw.map((p) => p[1]);
  let [low, high] = range ?? (ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1]);
  if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
  const width = svg.clientWidth || 400; // drawn in pixels, so that the text has the same size as on the page
  const x = (value) => 60 + ((width - 74) * (value - left)) / (right - left);
  const y = (value) => 165 - (150 * (value - low)) / (high - low);
  const line = (vertices, style) =>
    `<polyline points="${vertices.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ")}" fill="none" stroke="${colour}" ${style}/>`;
  const text = (a, b, content, anchor = "end") =>
    `<text x="${a}" y="${b}" font-size="13" fill="#55606c" text-anchor="${anchor}">${content}</text>`;
  const digits = (value) => (Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(2))));
  const short = (value) => (Math.abs(value) < 1e-12 ? "0" : digits(value));
  const gridLine = (value) => `<path d="M60 ${y(value)}H${width - 14}" stroke="#e3e8ec"/>` + text(54, y(value) + 4, short(value));
  svg.setAttribute("viewBox", `0 0 ${width} 200`);
  svg.setAttribute("aria-label", ys.length ? `${label}, from ${short(ys[0])} to ${short(ys.at(-1))}` : `${label}: nothing yet`);
  svg.dataset.points = points.length;
  svg.innerHTML = [low, (low + high) / 2, high].map(gridLine).join("") +
    text(60, 189, `step ${left}`, "start") + text(width - 14, 189, right) +
    line(raw, 'stroke-opacity="0.75"') + line(movingAverage(raw), 'stroke-width="2.5" stroke-linejoin="round"') +
    (points.length ? "" : text(width / 2, 94, "nothing yet", "middle"));
}

// --- start

showFiles();
refresh();
const options = { headers: { Accept: "application/json" }, cache: "no-store" }; // the cache may hold the page for this URL
fetchJson("/", options).then((basics) => ($("train").elements.base_model_path.placeholder = basics.model)).catch(() => {});
addEventListener("hashchange", () => refresh().then(chooseJob));
addEventListener("resize", schedulePaint);
setInterval(() => {
  if (document.hidden) return;
  refresh();
  if ($("log").open && job && active(job)) showLog();
}, 5000);

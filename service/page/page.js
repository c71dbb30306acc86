// The service's page: data sets, the form, jobs, and one job live. Nothing here leaves the machine.
"use strict";

const $ = (id) => document.getElementById(id);
let jobs = []; // as the service lists them: in the order they were queued
let shown = null; // the id of the job on show; the address has it too
let job = null; // that job as last heard of
let source = null; // its events, while it is not over
let held = []; // its metrics, one row a step
let pace = null; // {step, time} when this page saw it take a step first, and `last`, when it saw the newest
let cancelled = null; // the id of the job that Cancel was pressed for
let painting = false;

async function ask(path, options = {}) {
  const reply = await fetch(path, options).catch(() => null);
  reached(reply !== null);
  if (!reply) throw new Error("the service cannot be reached");
  if (reply.ok) return reply;
  throw new Error(complaint(await reply.json().catch(() => ({})), reply.status));
}

const call = async (path, options) => (await ask(path, options)).json();

function complaint(body, status) {
  const one = (each) => (each.msg ? `${each.loc.at(-1)}: ${each.msg}` : each);
  return [body.detail ?? `the service could not do it (${status})`].flat().map(one).join("; ");
}

function reached(yes) {
  const was = !$("lost").textContent;
  if (was === yes) return;
  $("lost").textContent = yes ? "" : "Connection lost, trying again …";
  if (!yes) return;
  showFiles();
  if (shown) loadSamples();
  if (shown && source.readyState !== EventSource.OPEN) listen();
}

function make(tag, text = "", kind = "", ...inside) {
  const made = Object.assign(document.createElement(tag), { textContent: text, className: kind });
  made.append(...inside);
  return made;
}

const when = (time) => new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

function lasting(seconds) {
  if (seconds < 2) return "a moment";
  if (seconds < 90) return `${Math.round(seconds)} seconds`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} minutes`;
  return `${(seconds / 3600).toFixed(1)} hours`;
}

// --- pictures

function upload(file) {
  const request = new XMLHttpRequest(); // fetch says nothing about how far an upload is
  const form = new FormData();
  form.append("file", file);
  const say = (text, kind = "soft") => Object.assign($("uploading"), { textContent: `${file.name} ${text}`, className: kind });
  request.upload.onprogress = (e) => say(`is on its way: ${Math.round((100 * e.loaded) / e.total)} %`);
  request.upload.onload = () => say("is being looked through …");
  request.onload = () => {
    const body = request.response ?? {};
    if (request.status === 200) say("is here");
    else say(`was not taken: ${complaint(body, request.status)}`, "bad");
    showFiles(body.file_id);
  };
  request.onerror = () => say("did not get there. Is the service running, and the file not too large for it?", "bad");
  request.responseType = "json";
  request.open("POST", "/upload-data");
  request.send(form);
  $("zip").value = ""; // so that the same name can be chosen again
}

async function showFiles(chosen) {
  const files = await call("/files").catch(() => null);
  if (!files) return;
  files.reverse(); // the newest first
  const select = $("train").elements.data_file_id;
  const kept = chosen ?? select.value;
  const option = (file) => new Option(`${file.filename}, ${when(file.upload_time)}`, file.file_id);
  select.replaceChildren(...files.map(option));
  if (files.some((file) => file.file_id === kept)) select.value = kept;
  if (select.ariaInvalid === "true") mark(select);
  $("files").replaceChildren(...files.map((file, place) => fileItem(file, place === 0)));
}

function fileItem(file, open) {
  const item = make("details", "", "fold");
  const about = `${when(file.upload_time)} · ${file.csv_rows} rows, ${file.valid_images} pictures`;
  const summary = make("summary", "", "", make("b", file.filename), make("small", about));
  const pictures = make("div", "", "pictures");
  const wrong = make("p", "", "bad");
  const remove = make("button", "Delete these pictures", "quiet");
  if (file.problems.length) summary.append(make("small", "some rows cannot be used", "bad"));
  pictures.tabIndex = 0; // so that the keyboard can scroll it
  remove.onclick = () => deleteFile(file).catch((error) => (wrong.textContent = error.message));
  item.ontoggle = () => {
    if (!item.open || pictures.children.length) return;
    for (let i = 0; i < Math.min(8, file.valid_images); i++) pictures.append(figure(file.file_id, i));
  };
  item.append(summary, pictures, ...file.problems.map((problem) => make("p", problem, "bad")), remove, wrong);
  item.open = open;
  return item;
}

async function deleteFile(file) {
  const means = "A job that waits or trains with them has to be cancelled first. Finished jobs keep what they have " +
    "learned; cancelled and failed ones cannot be resumed without them.";
  if (!confirm(`Delete ${file.filename}?\n\n${means}`)) return;
  await call(`/files/${file.file_id}`, { method: "DELETE" }).catch((error) => {
    throw new Error(jobs.reduce((text, each) => text.replace(each.job_id, `“${each.job_name}”`), error.message));
  });
  $("uploading").textContent = "";
  await showFiles();
}

function figure(id, number) {
  const [image, caption] = [make("img"), make("figcaption", "", "soft")];
  const made = make("figure", "", "", image, caption);
  const said = (reply, name) => decodeURIComponent(reply.headers.get(name));
  const show = async (reply) => {
    caption.textContent = `${said(reply, "x-question")} ${said(reply, "x-answer")}`;
    image.src = URL.createObjectURL(await reply.blob());
    image.onload = () => URL.revokeObjectURL(image.src);
  };
  image.alt = "";
  ask(`/files/${id}/picture/${number}`).then(show).catch(() => made.remove());
  return made;
}

$("zip").onchange = () => $("zip").files[0] && upload($("zip").files[0]);
for (const name of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]);
  });
  // beside it a dropped file would take the page's place
  addEventListener(name, (event) => event.target.type !== "file" && event.preventDefault());
}

// --- forms

function objection({ validity, type, tagName, required, value, min, max }) {
  if (tagName === "SELECT" && !value) return "upload pictures first";
  if (type === "file" && !value) return "choose a picture";
  if (type === "number" && !value) return "a number is needed";
  if (validity.rangeUnderflow) return `at least ${min}`;
  if (validity.rangeOverflow) return `at most ${max}`;
  if (validity.stepMismatch) return "a whole number, please";
  return required && !value.trim() ? "something is needed here" : "";
}

function mark(field) {
  const text = objection(field);
  const label = field.closest("label");
  (label.querySelector(".bad") ?? label.appendChild(make("small", "", "bad"))).textContent = text;
  field.setAttribute("aria-invalid", Boolean(text));
  return text;
}

function refused(form) {
  const wrong = [...form.elements].filter((field) => field.name && mark(field));
  for (const field of wrong) if (field.closest("details")) field.closest("details").open = true;
  wrong[0]?.focus();
  return wrong.length > 0;
}

for (const form of [$("train"), $("predict")]) {
  form.addEventListener("input", (event) => event.target.ariaInvalid === "true" && mark(event.target));
}

$("train").onsubmit = async (event) => {
  event.preventDefault();
  if (refused($("train"))) return;
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
  button.disabled = true; // a second press would be a second job
  try {
    $("trouble").textContent = "";
    location.hash = (await call("/train", { method: "POST", headers, body: JSON.stringify(body) })).job_id;
    $("job").hidden = false;
    $("job").scrollIntoView();
  } catch (error) {
    $("trouble").textContent = error.message;
  }
  button.disabled = false;
};

// --- jobs

const active = (each) => ["queued", "training"].includes(each.status);

async function refresh() {
  jobs = await call("/jobs").catch(() => jobs);
  if (!shown) choose();
  const now = jobs.find((each) => each.job_id === shown);
  // resumed elsewhere, or refused when it was asked last
  if (now && active(now) && (source?.readyState ?? EventSource.CLOSED) === EventSource.CLOSED) listen();
  paint();
}

function choose() {
  const wanted = location.hash.slice(1);
  const named = jobs.find((each) => each.job_id === wanted);
  const next = named ?? jobs.find((each) => each.status === "training") ?? jobs.at(-1);
  if (!next) return;
  if (!named) history.replaceState(null, "", `#${next.job_id}`);
  if (next.job_id !== shown) show(next.job_id);
}

function show(id) {
  [shown, held, pace, sampled] = [id, [], null, ""];
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
  source = new EventSource(`/jobs/${shown}/events`);
  source.onopen = () => reached(true);
  source.onerror = () => {
    if (job && !active(job)) source.close(); // all was said; else the browser would connect again and again
    else reached(false);
  };
  source.addEventListener("job", (event) => heard([JSON.parse(event.data)].flat().at(-1)));
  source.addEventListener("metrics", (event) => {
    for (const row of [JSON.parse(event.data)].flat()) {
      while (held.length && held.at(-1).step >= row.step) held.pop(); // resumed from an earlier step
      held.push(row);
    }
    later();
  });
}

function heard(now) {
  const before = job;
  job = now;
  jobs = jobs.map((each) => (each.job_id === now.job_id ? now : each));
  if (!active(now) && now.job_id === cancelled) cancelled = null;
  const step = now.current_step;
  if (now.status !== "training" || !step || step < pace?.step) pace = null;
  if (now.status === "training" && step) pace ??= { step, time: Date.now() };
  if (pace && step !== before?.current_step) pace.last = Date.now();
  if (before?.status !== now.status) refresh(); // the others moved up in the line
  if (before && (step !== before.current_step || before.status !== now.status)) sampleSoon();
  later();
}

function later() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(paint);
}

function paint() {
  painting = false;
  listJobs();
  if (job) paintJob();
  const label = (name) => `${name} over ${held.length} steps`;
  curve($("reward"), label("right answers"), held.map((row) => [row.step, row.reward]), "#0b6e69", [0, 1]);
  if ($("log").open) curve($("loss"), label("loss"), held.map((row) => [row.step, row.loss]), "#b8405a");
}

function listJobs() {
  const list = $("jobs");
  if (jobs.length && list.firstElementChild?.tagName === "P") list.replaceChildren();
  [...jobs].reverse().forEach((each, place) => {
    const found = [...list.children].find((item) => item.hash === `#${each.job_id}`);
    const item = found ?? jobItem(each);
    item.querySelector("small").textContent = `${when(each.created_at)} · ${far(each)}`;
    Object.assign(item.lastChild, { textContent: word(each), className: `status ${each.status}` });
    item.setAttribute("aria-current", each.job_id === shown);
    // an item that is moved loses the keyboard
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
  });
}

function jobItem(each) {
  const words = make("span", "", "grow", make("b", each.job_name, "clamp"), make("small"));
  const onclick = () => $("job").scrollIntoView();
  return Object.assign(make("a", "", "row", words, make("span")), { href: `#${each.job_id}`, title: each.job_name, onclick });
}

const stopping = (each) => each.stopping || (each.status === "training" && each.job_id === cancelled);
const word = (each) => (stopping(each) ? "stopping" : each.status);

function far(each) {
  if (each.status !== "queued") return `step ${each.current_step} of ${each.total_steps}`;
  const place = 1 + jobs.filter((other) => other.status === "queued").findIndex((other) => other.job_id === each.job_id);
  if (!place) return "waiting in line";
  const ending = Math.floor(place / 10) % 10 === 1 ? "th" : ["th", "st", "nd", "rd"][place % 10] ?? "th";
  return `${place}${ending} in line`;
}

function paintJob() {
  const number = (value) => (value == null ? "–" : value.toFixed(2).replace(/^-(0\.0+)$/, "$1"));
  const facts = [["Right answers", number(job.reward)], ["How far it is", far(job)], ["Time", time()]];
  const fact = ([name, text]) => make("div", "", "", make("dt", name), make("dd", text));
  $("name").textContent = job.job_name;
  Object.assign($("status"), { textContent: word(job), className: `status ${job.status}` });
  $("progress").value = job.progress;
  $("facts").replaceChildren(...facts.filter(([, text]) => text).map(fact));
  if ($("note").textContent !== note()) $("note").textContent = note(); // else it would be read out again
  $("error").textContent = job.error_message ?? "";
  $("cancel").hidden = !active(job);
  $("cancel").disabled = stopping(job) || job.job_id === cancelled;
  $("resume").hidden = !["failed", "cancelled"].includes(job.status);
  $("download").hidden = $("predict").hidden = job.status !== "completed";
  $("download").href = `/jobs/${job.job_id}/download`;
}

function note() {
  if (stopping(job)) return "Stopping, it saves what it has learned.";
  if (job.status === "queued") return "It starts by itself when the jobs before it are over.";
  if (job.status === "training") return job.current_step ? "" : "It gets ready: the model is being loaded.";
  return job.status === "cancelled" ? "Resume goes on from what it has saved." : "";
}

function time() {
  const spent = held.reduce((sum, row) => sum + (row.step_time ?? 0), 0);
  const sofar = spent && lasting(spent) + (active(job) ? " so far" : "");
  const steps = pace && !stopping(job) ? job.current_step - pace.step : 0;
  const left = ((pace?.last - pace?.time) / 1000 / steps) * (job.total_steps - job.current_step);
  return [sofar, steps >= 2 && `about ${lasting(left)} left`].filter(Boolean).join(", ");
}

const act = (method, path) => call(`/jobs/${shown}${path}`, { method });

$("cancel").onclick = async () => {
  cancelled = shown;
  $("wrong").textContent = "";
  paint();
  await act("DELETE", "").catch((error) => {
    $("wrong").textContent = error.message;
    cancelled = null;
  });
  refresh();
};

$("resume").onclick = async () => {
  $("wrong").textContent = "";
  $("resume").disabled = true;
  cancelled = null;
  await act("POST", "/resume").then(() => show(shown), (error) => ($("wrong").textContent = error.message));
  $("resume").disabled = false;
};

$("predict").onsubmit = async (event) => {
  event.preventDefault();
  if (refused($("predict"))) return;
  const [button, about] = [$("predict").querySelector("button"), shown];
  $("said").textContent = "It looks at the picture; this may take a minute …";
  button.disabled = true;
  const asked = { method: "POST", body: new FormData($("predict")) };
  const answer = await call(`/jobs/${about}/predict`, asked).then((reply) => reply.answer, (error) => error.message);
  if (about === shown) $("said").textContent = answer;
  button.disabled = false;
};

// --- what it answers, and what it printed

// The page inside has a heading and a column that say nothing to this one's readers.
const INSIDE = `<style>body { margin: 0 auto; } h1, h1 + p, th:nth-child(2), td:nth-child(2) { display: none; }
  article:first-of-type { border: 0; } figure { flex-basis: 9em; } th { font-size: 0; padding: 4px 9px; }
  th::after { font-size: 14px; content: "answer"; } th:first-child::after { content: "points"; }</style>`;
let sampled = ""; // the page on show
let soon = null;

function sampleSoon() {
  if (!active(job)) loadSamples();
  else soon ??= setTimeout(() => loadSamples(), 3000); // a step's page is written a little after the step is reported
}

async function loadSamples(asked = false) {
  clearTimeout(soon);
  soon = null;
  const [frame, about] = [$("completions"), shown];
  const reads = () => !asked && frame.contentWindow?.scrollY > 0; // whoever reads keeps the place
  const text = reads() ? "" : await ask(`/jobs/${about}/completions`).then((reply) => reply.text(), () => sampled);
  if (about !== shown) return;
  $("newer").hidden = !reads();
  if (reads() || text === sampled || !text.includes("<article")) return;
  sampled = text;
  frame.srcdoc = text + INSIDE; // without scripts: the sandbox has none
  [frame.hidden, $("nothing").hidden] = [false, true];
}

async function showLog() {
  const about = shown;
  const text = await ask(`/jobs/${about}/logs`).then((reply) => reply.text(), (error) => error.message);
  if (about === shown) $("log").querySelector("pre").textContent = text;
}

$("newer").onclick = () => loadSamples(true);
$("log").ontoggle = () => $("log").open && (showLog(), later());

// --- curves

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function thinned(points, most = 300) {
  const size = Math.max(1, points.length / most);
  const made = [];
  for (let at = 0; at < points.length; at += size) {
    const bin = points.slice(Math.floor(at), Math.floor(at + size));
    made.push([mean(bin.map((p) => p[0])), mean(bin.map((p) => p[1]))]);
  }
  return made;
}

function smoothed(points) {
  const reach = points.length < 12 ? 0 : Math.ceil(points.length / 30);
  return points.map(([x], i) => [x, mean(points.slice(Math.max(0, i - reach), i + reach + 1).map((p) => p[1]))]);
}

function curve(svg, label, points, colour, range) {
  points = points.filter(([, y]) => Number.isFinite(y));
  const [left, right] = [points[0]?.[0] ?? 1, Math.max(points.at(-1)?.[0] ?? 2, (points[0]?.[0] ?? 1) + 1)];
  const raw = thinned(points);
  const ys = raw.map((p) => p[1]);
  let [low, high] = range ?? (ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1]);
  if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
  const width = svg.clientWidth || 400; // drawn in pixels, so that letters are as large as elsewhere
  const x = (value) => 52 + ((width - 66) * (value - left)) / (right - left);
  const y = (value) => 165 - (150 * (value - low)) / (high - low);
  const line = (some, style) =>
    `<polyline points="${some.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ")}" fill="none" stroke="${colour}" ${style}/>`;
  const text = (a, b, words, anchor = "end") =>
    `<text x="${a}" y="${b}" font-size="13" fill="#55606c" text-anchor="${anchor}">${words}</text>`;
  const short = (value) => (Math.abs(value) < 1e-12 ? "0" : String(Number(value.toPrecision(2))));
  const rule = (value) => `<path d="M52 ${y(value)}H${width - 14}" stroke="#e3e8ec"/>` + text(46, y(value) + 4, short(value));
  svg.setAttribute("viewBox", `0 0 ${width} 200`);
  svg.setAttribute("aria-label", ys.length ? `${label}, from ${short(ys[0])} to ${short(ys.at(-1))}` : `${label}: nothing yet`);
  svg.dataset.points = points.length;
  svg.innerHTML = [low, (low + high) / 2, high].map(rule).join("") +
    text(52, 189, `step ${left}`, "start") + text(width - 14, 189, right) +
    line(raw, 'stroke-opacity="0.3"') + line(smoothed(raw), 'stroke-width="2.5" stroke-linejoin="round"') +
    (points.length ? "" : text(width / 2, 94, "nothing yet", "middle"));
}

// --- the start

showFiles();
refresh();
const basics = { headers: { Accept: "application/json" }, cache: "no-store" }; // the page has the same address
call("/", basics).then((about) => ($("train").elements.base_model_path.placeholder = about.model)).catch(() => {});
addEventListener("hashchange", () => refresh().then(choose));
addEventListener("resize", later);
setInterval(() => {
  if (document.hidden) return;
  refresh();
  if ($("log").open && job && active(job)) showLog();
}, 5000);

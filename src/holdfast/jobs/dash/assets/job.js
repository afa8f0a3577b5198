// The page of one job: facts, attempts, homes with their curves, and output.

import { Curves } from "./curves.js";
import { make, makeFacts, makeTable, reconcile, setText } from "./dom.js";
import { durations, moment, span } from "./format.js";
import { showStatus } from "./list.js";
import { Output } from "./output.js";
import { Poller, serverNow } from "./poller.js";

const EVERY_MS = 2000;
const HEADINGS = [
  ["Attempt"], ["Started", "started"], ["Took", "number"], ["Lost", "number wide"], ["Step", "number"], ["Exit"],
  ["Machines", "machines wide"],
];

/** Show a job, and return a function that ends it. */
export function showJob(main, number) {
  let data = null, output = null, lastStatus = null;
  const name = make("span", {}, `Job ${number}`);
  const badge = make("span", { class: "status" });
  const reason = make("p", { class: "lead" });
  const [facts, showFacts] = makeFacts();
  const [paths, showPaths] = makeFacts({ class: "facts paths" });
  const [table, attempts] = makeTable("Attempts", HEADINGS);
  const attemptsSection = section("attempts", "Attempts", table);
  const homes = make("div", { class: "runs" });
  const outputPlace = section("output", "Output");
  const details = make("details", {}, make("summary", {}, "Paths"), paths);
  const body = make("div", { hidden: true }, facts, attemptsSection, homes, outputPlace, details);
  const note = make("p", { class: "note" }, "Reading the job...");
  main.append(make("div", { class: "title" }, make("h1", {}, name), badge), reason, note, body);
  const curves = new Map();

  function onValue(value) {
    data = value;
    const { job } = data;
    body.hidden = false;
    note.hidden = true;
    setText(name, `${job.id}: ${job.name}`);
    document.title = `${job.status} - ${job.name} - Holdfast`;
    showStatus(badge, job);
    setText(reason, job.reason);
    reason.hidden = job.reason === "";
    if (lastStatus !== null && lastStatus !== job.status) {
      setText(document.getElementById("news"), `Job ${job.id} is ${job.status.replaceAll("_", " ")} now.`);
    }
    if (lastStatus !== job.status) output?.poller.soon();
    lastStatus = job.status;
    attemptsSection.hidden = data.attempts.length === 0;
    table.classList.toggle("without-machines", !data.attempts.some((one) => one.machines.length));
    reconcile(homes, data.homes, (home) => home.id, (home) => {
      const found = new Curves(`api/jobs/${number}/homes/${home.id}`, home);
      curves.set(home.id, found);
      return found.element;
    }, (_, home) => curves.get(home.id).update(home));
    showPaths([["Folder", data.folder],
      ...data.workdirs.map((path, rank) => [data.workdirs.length > 1 ? `Workdir ${rank}` : "Workdir", path]),
      ...data.logs.map((path, rank) => [data.logs.length > 1 ? `Log ${rank}` : "Log", path])]);
    output ??= new Output(outputPlace, job);
    render();
  }

  function render() {
    if (data === null) return;
    const { job } = data;
    const now = serverNow();
    const took = durations(job, now);
    reconcile(attempts, [...data.attempts].reverse(), (one) => one.number, makeAttempt,
      (row, one) => updateAttempt(row, one, job, now));
    showFacts([
      ["Total", span(took.total)], ["Running", span(took.running)],
      ["Down", job.recoveries || took.down ? span(took.down) : null],
      ["Recoveries", job.recoveries],
      ["Lost work", job.recoveries || data.lost_s ? span(data.lost_s) : null],
      ["Newest step", job.step ?? "-"],
      ["Exit status", job.is_final ? job.exit_status : null],
      ["Submitted", moment(job.submitted_unix_s)],
      ["Ended", job.ended_unix_s === null ? null : moment(job.ended_unix_s)],
      ["Engine", job.engine_job_id ? `${job.engine}, there ${job.engine_job_id}` : job.engine],
      ["Nodes", job.num_nodes],
      ["GPUs", gpusOf(job)],
      ["Priority", job.priority || null],
      ["After job", job.after],
      ["Task id", job.task_id],
    ]);
  }

  function onError(error) {
    setText(note, error.message);
    note.hidden = false;
  }

  const poller = new Poller(() => `api/jobs/${number}`, EVERY_MS, onValue, onError);
  const ticking = setInterval(render, 1000);
  return () => {
    poller.stop();
    clearInterval(ticking);
    output?.stop();
    for (const one of curves.values()) one.stop();
  };
}

function section(id, title, ...children) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...children);
}

function makeAttempt(one) {
  const title = make("th", { scope: "row" }, String(one.number), make("span", { class: "reason" }));
  return make("tr", {}, title, ...HEADINGS.slice(1).map(([, kind]) => make("td", { class: kind ?? null })));
}

function updateAttempt(row, one, job, now) {
  const isOver = one.ended_unix_s !== null;
  const isNewest = one.number === job.attempt;
  const failed = one.checks.filter((line) => line.includes("failed")).map((line) => line.trim());
  setText(row.querySelector(".reason"), [isOver ? one.reason.split("\n")[0] || one.status : "", ...failed].filter(Boolean).join("; "));
  row.title = one.checks.join("\n");
  const texts = [
    moment(one.started_unix_s), span((one.ended_unix_s ?? now) - one.started_unix_s),
    one.lost_s ? span(one.lost_s) : "-", (isNewest ? job.step : one.step) ?? "-", one.exits.join(" ").trim() || "-",
    one.machines.join(" "),
  ];
  texts.forEach((text, index) => setText(row.children[index + 1], text));
}

function gpusOf(job) {
  if (!job.gpus.some((one) => one.length)) return null;
  return job.gpus.map((one, rank) => (job.num_nodes > 1 ? `node ${rank}: ${one.join(", ")}` : one.join(", "))).join("; ");
}

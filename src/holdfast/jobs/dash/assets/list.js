// The list of jobs: those that have not ended first.

import { make, makeTable, reconcile, setAttribute, setText } from "./dom.js";
import { durations, plural, span } from "./format.js";
import { Poller, serverNow } from "./poller.js";

const EVERY_MS = 2000;
const RUN_EVERY_MS = 10000;
const RUN_HEADINGS = [["Run"], ["State", "wrap"], ["Step", "number"], ["Last event", "number"]];
const HEADINGS = [
  ["Job"], ["Status"], ["Total", "number"], ["Running", "number wide"], ["Down", "number wide"],
  ["Recoveries", "number wide"], ["Step", "number"], ["Nodes", "number wide"], ["On", "wide"],
];

/** Show the list, and return a function that ends it. */
export function showList(main) {
  let data = null;
  const filter = make("input", { type: "search", id: "filter", autocomplete: "off", oninput: () => render() });
  const [table, body] = makeTable("Jobs", HEADINGS);
  const problems = make("ul", { class: "problems", "aria-label": "Problems" });
  const note = make("p", { class: "note" }, "Reading the jobs...");
  const [homesTable, homes] = makeTable("Runs", RUN_HEADINGS);
  homes.classList.add("homes");
  const runs = make("section", { "aria-labelledby": "runs-title", hidden: true },
    make("h2", { id: "runs-title" }, "Runs"), homesTable);
  const states = new Map();
  const pollers = [];
  table.hidden = true;
  main.append(
    make("div", { class: "title" }, make("h1", {}, "Jobs"),
      make("label", { for: "filter" }, "Filter by name or status "), filter),
    problems, note, table, runs);

  function render() {
    if (data === null) return;
    const words = filter.value.trim().toLowerCase();
    const shown = data.jobs.filter((job) => `${job.id} ${job.name} ${job.status}`.toLowerCase().includes(words));
    const now = serverNow();
    reconcile(body, shown, (job) => job.id, makeRow, (row, job) => updateRow(row, job, now));
    table.hidden = shown.length === 0;
    setText(note, noteOf(data, shown));
    note.hidden = note.textContent === "";
    reconcile(problems, data.problems, (text) => text, (text) => make("li", {}, text), () => {});
    reconcile(homes, data.homes, (home) => home.id, makeRun, (row, home) => updateRun(row, home, now));
    runs.hidden = data.homes.length === 0;
  }

  function makeRun(home) {
    if (!home.is_remote) {
      const keep = (state) => { states.set(home.id, state); render(); };
      pollers.push(new Poller(() => `api/homes/${home.id}/state`, RUN_EVERY_MS, keep, (error) => keep({ state: error.message })));
    }
    const cells = RUN_HEADINGS.slice(1).map(([, kind]) => make("td", { class: kind ?? null }));
    return make("tr", {}, make("th", { scope: "row" }, make("a", { href: `#/runs/${home.id}` }, home.place)), ...cells);
  }

  function updateRun(row, home, now) {
    const found = states.get(home.id);
    const [, state, step, age] = row.children;
    setText(state, found?.state ?? (home.is_remote ? "in a bucket, which its page reads" : "reading..."));
    setText(step, found?.step ?? "-");
    setText(age, found?.last_unix_s ? `${span(now - found.last_unix_s)} ago` : "-");
  }

  pollers.push(new Poller(() => "api/jobs", EVERY_MS, (value) => { data = value; render(); }));
  const ticking = setInterval(render, 1000);
  return () => { for (const poller of pollers) poller.stop(); clearInterval(ticking); };
}

function noteOf(data, shown) {
  if (data.jobs.length === 0) return "There are no jobs. Start one with: holdfast launch TASK";
  if (shown.length === 0) return "No job matches.";
  return data.left_out ? `${plural(data.left_out, "older job")} not shown: holdfast queue --all lists them.` : "";
}

function makeRow(job) {
  const cells = HEADINGS.slice(1).map(([, kind]) => make("td", { class: kind ?? null }));
  const link = make("a", { href: `#/jobs/${job.id}` }, make("span", { class: "id" }, String(job.id)), " ",
    make("span", { class: "name" }, job.name));
  cells[0].append(make("span", { class: "status" }));
  return make("tr", {}, make("th", { scope: "row" }, link, make("span", { class: "reason" })), ...cells);
}

function updateRow(row, job, now) {
  const [title, status, total, running, down, recoveries, step, nodes, on] = row.children;
  const took = durations(job, now);
  setText(title.querySelector(".name"), job.name);
  setText(title.querySelector(".reason"), job.reason.split("\n")[0]);
  showStatus(status.firstElementChild, job);
  setText(total, span(took.total));
  setText(running, span(took.running));
  setText(down, span(took.down));
  setText(recoveries, job.recoveries);
  setText(step, job.step ?? "-");
  setText(nodes, job.num_nodes);
  setText(on, job.engine_job_id ? `${job.engine} ${job.engine_job_id}` : job.engine);
}

/** Show the status of a job as a badge: a word, and a colour beside it. */
export function showStatus(badge, job) {
  setText(badge, job.status.replaceAll("_", " "));
  const kind = job.status === "SUCCEEDED" ? "good" : job.status.startsWith("FAILED") ? "bad"
    : job.is_final ? "ended" : job.status === "RUNNING" ? "running" : "waiting";
  setAttribute(badge, "data-kind", kind);
}
